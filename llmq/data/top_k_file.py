"""Records of a teacher's k largest probabilities of one token, in 3 k + 8 bytes: 200 for 64.

    k uint16     the lower halves of their ids, which rise
    k uint8      their log-probabilities: c stands for -deepest * (c / 255)^2
    4 uint8      how many of the ids are below 65536, 2 * 65536, 3 * 65536; 0
    float16      deepest: the smallest log-probability without its sign
    uint16       65535 * what all other tokens have together

The square makes likely tokens exact: the step at a log-probability of -0.1 is 0.01 where the
deepest is -16. A reader scales the codes so that everything adds up to 1.
"""

from __future__ import annotations

import numpy as np

MOST = 255
LARGEST_ID = 4 << 16
_LEVELS = 255


def record_bytes(k: int) -> int:
    """Bytes of a record of k probabilities."""
    return 3 * k + 8


def encoded(told: np.ndarray) -> np.ndarray:
    """Records (n, bytes) uint8 of told (n, 2 k) float32: ids, rising, as the bits of int32, and
    log-probabilities."""
    n, k = len(told), told.shape[1] // 2
    ids = np.ascontiguousarray(told[:, :k]).view(np.int32)
    logs = np.minimum(told[:, k:], 0)
    # The next larger one of float16, so that no log-probability is below what codes stand for.
    deepest = np.maximum(-logs.min(axis=1), 2.0**-14)
    deepest = np.nextafter(deepest.astype(np.float16), np.float16(np.inf))
    codes = np.rint(_LEVELS * np.sqrt(-logs / deepest.astype(np.float32)[:, None]))
    rest = np.clip(1 - np.exp(logs.astype(np.float64)).sum(axis=1), 0, 1)
    below = np.stack([(ids < high << 16).sum(axis=1) for high in (1, 2, 3)] + [np.zeros(n)], axis=1)
    parts = (
        (ids & 0xFFFF).astype("<u2").view(np.uint8),
        codes.astype(np.uint8),
        below.astype(np.uint8),
        deepest.astype("<f2").view(np.uint8).reshape(n, 2),
        np.rint(65535 * rest).astype("<u2").view(np.uint8).reshape(n, 2),
    )
    return np.concatenate([part.reshape(n, -1) for part in parts], axis=1)


def decoded(records: np.ndarray) -> np.ndarray:
    """The opposite of `encoded`, (n, 2 k) float32; log-probabilities are NaN where all bits are 1:
    where nothing was written."""
    n, k = len(records), (records.shape[1] - 8) // 3
    low, codes, below, tail = np.split(records, [2 * k, 3 * k, 3 * k + 4], axis=1)
    places = np.arange(k)
    high = (places >= below[:, :3, None].astype(np.int32)).sum(axis=1)
    ids = np.ascontiguousarray(low).view("<u2").astype(np.int32) | high.astype(np.int32) << 16
    deepest = np.ascontiguousarray(tail[:, :2]).view("<f2").astype(np.float32)
    rest = np.ascontiguousarray(tail[:, 2:]).view("<u2") / 65535
    logs = -deepest * (codes.astype(np.float32) / _LEVELS) ** 2
    mass = np.exp(logs.astype(np.float64)).sum(axis=1, keepdims=True)
    scale = np.log(np.maximum(1 - rest, 2.0**-24) / mass).astype(np.float32)
    nothing = (records == 0xFF).all(axis=1)
    ids[nothing], logs[nothing] = 0, np.nan
    return np.concatenate([ids.view(np.float32).reshape(n, k), logs + scale], axis=1)
