"""References of cu/exp_codes.cu: what codes of exponentials of logits need to be a gradient."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import BF16, compute, decode_fp8, encode_fp8

BLOCK_ROWS = 32  # bits of a mask

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

    masks (ceil(rows / BLOCK_ROWS)): bits of rows that have a sum above largest; their shift becomes
    the one with which all their exponentials have the sum again.
    """
    counted = targets >= 0
    others = sums.sum(axis=0)
    logits = np.where(counted, target_logits, 0)
    with np.errstate(invalid="ignore", over="ignore"):
        of_target = np.where(counted, np.exp(logits - shift), 0)
        sum_ = others + of_target
        lse[...] = shift + np.log(sum_)
        clamped = counted & (sums.max(axis=0) > largest) & np.isfinite(sum_)
        shift[clamped] = lse[clamped] - np.log(np.float32(again))
        more = np.float32(z_loss) * lse
        losses[...] = np.where(counted, lse - logits, 0)
        factors[...] = np.where(counted, (1 + more) / np.where(clamped, again, sum_), 0)
        own[...] = np.where(counted, (more * of_target - others) / sum_, 0)
    bits = np.zeros(len(masks) * BLOCK_ROWS, np.uint8)
    bits[:rows] = clamped
    masks[...] = np.packbits(bits, bitorder="little").view(np.int32)


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
    found = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")[:rows])
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
    by = np.minimum(factors * over_scale, np.finfo(np.float16).max).astype(np.float16)
    result = (codes.astype(np.float16) * by[:, None]).astype(np.float32)
    counted = np.flatnonzero(targets >= 0)
    result[counted, targets[counted]] = own[counted] * over_scale
    encoded = np.empty(result.shape, np.uint8)
    encode_fp8(encoded, result, np.float32(1), turned.dtype)
    turned.view(np.uint8)[...] = encoded.T
