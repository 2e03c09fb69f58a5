"""References of cu/exp_codes.cu: what codes of exponentials of logits need to be a gradient."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import BF16, compute, decode_fp8, encode_fp8

BLOCK_ROWS = 32  # bits of a mask
# Sums within these are exact enough; below LEAST 1 / sum is above what exp_codes_turn takes.
SMALLEST, INFINITE, LEAST = (np.float32(x) for x in (1e-30, 3e38, 0.5))
LARGEST_SHIFT = np.float32(1024)

# rows, columns, K, vocab
CASES = {
    "small": (16, 96, 16, 90),
    "blocks": (80, 608, 272, 577),
    "qwen05b": (32768, 151936, 896, 151936),
    "qwen15b": (8192, 151936, 1536, 151936),
}


def exp_codes_shift(
    shift: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    scale_x: np.ndarray,
    scale_weight: np.ndarray,
    targets: np.ndarray,
    rows: int,
    K: int,
) -> None:
    """shift (rows) = scale_x * scale_weight * (x (rows,K) . weight (columns,K)[target]), rounded to
    BF16; target 0 where negative."""
    of_target = decode_fp8(weight[np.maximum(targets, 0)])
    logits = np.einsum("rk,rk->r", decode_fp8(x), of_target) * (scale_x[0] * scale_weight[0])
    shift[...] = logits.astype(BF16)


def exp_codes_finish(
    losses: np.ndarray,
    lse: np.ndarray,
    factors: np.ndarray,
    own: np.ndarray,
    masks: np.ndarray,
    far: np.ndarray,
    shift: np.ndarray,
    sums: np.ndarray,
    target_logits: np.ndarray,
    targets: np.ndarray,
    rows: int,
    tiles: int,
    z_loss: float,
    largest: float,
    again: float,
) -> None:
    """losses, lse, factors and own (rows), so that factor * e, and own where e has left the target
    out, is softmax * (1 + z_loss * lse) - onehot.

    masks (ceil(rows / BLOCK_ROWS)): bits of rows that have a sum of a tile above largest, or one of
    all below LEAST; their shift becomes the one with which their exponentials have the sum again.
    far: the same of rows whose sum says nothing, of which nothing else is right.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        sum_ = _finish(
            losses, lse, factors, own, shift, sums, target_logits, targets, z_loss, slice(None)
        )
        is_far = (sum_ > INFINITE) | (sum_ < SMALLEST) | (abs(shift) > LARGEST_SHIFT)
        made_again = (sums.max(axis=0) > largest) | (sum_ < LEAST)
        made_again &= (targets >= 0) & ~is_far
        shift[made_again] = lse[made_again] - np.log(np.float32(again))
        factors[made_again] *= sum_[made_again] / np.float32(again)
    masks[...], far[...] = _words(made_again), _words(is_far)


def exp_codes_finish_far(
    losses: np.ndarray,
    lse: np.ndarray,
    factors: np.ndarray,
    own: np.ndarray,
    far: np.ndarray,
    shift: np.ndarray,
    sums: np.ndarray,
    target_logits: np.ndarray,
    targets: np.ndarray,
    rows: int,
    tiles: int,
    z_loss: float,
) -> None:
    """The same of the rows of far, of a shift and sums that say all."""
    found = _rows_of(far, rows)
    with np.errstate(invalid="ignore", over="ignore"):
        _finish(losses, lse, factors, own, shift, sums, target_logits, targets, z_loss, found)


def exp_codes_center(
    shift: np.ndarray,
    masks: np.ndarray,
    most: np.ndarray,
    far: np.ndarray,
    rows: int,
    tiles: int,
    room: float,
) -> None:
    """shift (rows) = the largest of most (tiles, rows) - room, of the rows of far; so has masks."""
    found = _rows_of(far, rows)
    shift[found] = most[:, found].max(axis=0) - np.float32(room)
    masks |= far


def _finish(
    losses: np.ndarray,
    lse: np.ndarray,
    factors: np.ndarray,
    own: np.ndarray,
    shift: np.ndarray,
    sums: np.ndarray,
    target_logits: np.ndarray,
    targets: np.ndarray,
    z_loss: float,
    some: np.ndarray | slice,
) -> np.ndarray:
    """Of some rows; returns their sums."""
    counted, before = targets[some] >= 0, shift[some]
    others = sums[:, some].sum(axis=0)
    logits = np.where(counted, target_logits[some], 0)
    of_target = np.where(counted, np.exp(logits - before), 0)
    sum_ = others + of_target
    row_lse = before + np.log(sum_)
    more = np.float32(z_loss) * row_lse
    lse[some] = row_lse
    losses[some] = np.where(counted, row_lse - logits, 0)
    factors[some] = np.where(counted, (1 + more) / sum_, 0)
    own[some] = np.where(counted, (more * of_target - others) / sum_, 0)
    return sum_


def _words(bits: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(bits) // BLOCK_ROWS) * BLOCK_ROWS, bool)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.int32)


def _rows_of(words: np.ndarray, rows: int) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:rows])


def exp_codes_gather(
    listed: np.ndarray,
    listed_x: np.ndarray,
    masks: np.ndarray,
    x: np.ndarray,
    rows: int,
    K: int,
) -> None:
    """listed (1 + rows): how many bits of masks are set, and of which rows; listed_x (rows,K):
    these of x (rows,K)."""
    found = _rows_of(masks, rows)
    listed[0] = len(found)
    listed[1 : 1 + len(found)] = found
    listed_x[: len(found)] = x[found]


def exp_codes_input(
    d: np.ndarray,
    factors: np.ndarray,
    own: np.ndarray,
    weight: np.ndarray,
    scale_weight: np.ndarray,
    targets: np.ndarray,
    rows: int,
    K: int,
) -> None:
    """d (rows,K) = factors * d + own * scale_weight * weight (columns,K)[target], 0 if masked."""
    by = (own * scale_weight[0])[:, None]
    result = by * decode_fp8(weight[np.maximum(targets, 0)]) + compute(d) * factors[:, None]
    d[...] = np.where(targets[:, None] < 0, 0, result)


def exp_codes_turn(
    turned: np.ndarray,
    codes: np.ndarray,
    factors: np.ndarray,
    own: np.ndarray,
    targets: np.ndarray,
    rows: int,
    columns: int,
    over_scale: float,
) -> None:
    """turned (columns,rows) = over_scale times factors * codes (rows,columns), transposed, and own
    where targets are.

    Products and factors are halves, which have E5M2's exponents.
    """
    over_scale = np.float32(over_scale)
    largest = np.finfo(np.float16).max
    by = np.clip(factors * over_scale, -largest, largest).astype(np.float16)
    result = (codes.astype(np.float16) * by[:, None]).astype(np.float32)
    counted = np.flatnonzero(targets >= 0)
    result[counted, targets[counted]] = own[counted] * over_scale
    encoded = np.empty(result.shape, np.uint8)
    encode_fp8(encoded, result, np.float32(1), turned.dtype)
    turned.view(np.uint8)[...] = encoded.T
