"""References of cu/quantize.cu: FP8 with one scale for the whole tensor."""

from __future__ import annotations

import functools

import numpy as np

from llmq.dtypes import E4M3, E4M3_MAX, E5M2, E5M2_MAX
from llmq.ref.common import row_blocks

# rows, columns
CASES = {
    "smallest": (16, 16),
    "one_tile": (128, 64),
    "ragged": (144, 80),
    "wide": (16, 720),
    "tall": (400, 48),
    "qwen05b": (32 * 1024, 896),
    "qwen05b_mlp": (32 * 1024, 4864),
    "qwen05b_d_up_gate": (32 * 1024, 9728),
    "qwen05b_weight": (9728, 896),
    "qwen15b": (32 * 1024, 1536),
    "qwen15b_mlp": (32 * 1024, 8960),
}

LARGEST = {E4M3.numpy: np.float32(E4M3_MAX), E5M2.numpy: np.float32(E5M2_MAX)}
LEAST_ABS_MAX = np.float32(1e-10)  # so that all-zero tensors have a finite factor
NAN = 0x7F  # what NVIDIA's conversion writes for NaN, of either sign, in both formats


def _factor(scale: np.ndarray, abs_max: np.ndarray, dtype: np.dtype) -> np.float32:
    """Writes the scale; returns what x is multiplied by."""
    if not np.isfinite(abs_max[0]):
        scale[0] = 1
        return np.float32(1)
    m = max(abs_max[0], LEAST_ABS_MAX)
    scale[0] = m / LARGEST[dtype]
    return LARGEST[dtype] / m


@functools.cache
def _codes(dtype: np.dtype) -> np.ndarray:
    """What the F32 numbers whose lower 16 bits are zero become, by their upper 16 bits; uint8."""
    numbers = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # of NaN
        codes = numbers.clip(-LARGEST[dtype], LARGEST[dtype]).astype(dtype).view(np.uint8)
    codes[np.isnan(numbers)] = NAN
    return codes


def _encode(codes: np.ndarray, x: np.ndarray, factor: np.float32, dtype: np.dtype) -> None:
    """codes = x * factor in dtype, rounded to nearest even, clamped to the largest finite values.

    Of its lower 16 bits, rounding a number to 8 needs to know only whether they are all zero: they
    become one bit, which is not the one that decides a tie, and a table has the rest. That is
    several times as fast as ml_dtypes' conversion.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        bits = (x.astype(np.float32, copy=False) * factor).view(np.uint32)
    lower = bits & np.uint32(0xFFFF)
    bits >>= 16
    bits |= np.minimum(lower, 1, out=lower)
    # "wrap", of which these have no need, writes to `out` without a buffer in between.
    _codes(dtype).take(bits, out=codes, mode="wrap")


def quantize(q: np.ndarray, scale: np.ndarray, x: np.ndarray, abs_max: np.ndarray, n: int) -> None:
    """q = x / scale, scale = abs_max / the largest finite value of q's format."""
    factor = _factor(scale, abs_max, q.dtype)
    codes, x = q.reshape(-1).view(np.uint8), x.reshape(-1)
    for block in row_blocks(n, 1):
        _encode(codes[block], x[block], factor, q.dtype)


def quantize_transpose(
    q: np.ndarray | None,
    q_t: np.ndarray,
    scale: np.ndarray,
    x: np.ndarray,
    abs_max: np.ndarray,
    rows: int,
    cols: int,
) -> None:
    """As quantize; q_t gets the transpose of q, which may be None."""
    factor = _factor(scale, abs_max, q_t.dtype)
    codes = np.empty(x.shape, np.uint8) if q is None else q.view(np.uint8)
    for block in row_blocks(rows, cols):
        _encode(codes[block], x[block], factor, q_t.dtype)
        q_t.view(np.uint8)[:, block] = codes[block].T
