"""Reference of RMSNorm, alone and fused with the residual addition before or after it."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import compute, emit_fp8, store_gradient, update_abs_max

# name: (rows, C)
CASES = {
    "one_row": (1, 64),
    "narrow": (37, 72),
    "warp_per_row": (19, 896),
    "two_warps_per_row": (9, 1536),
    "four_warps_per_row": (11, 3584),
    "widest": (5, 8192),
    "qwen05b": (32768, 896),
    "qwen15b": (32768, 1536),
    "qwen7b": (16384, 3584),
}

BLOCK = 1 << 17  # elements of the rows worked on at a time, so that temporaries stay in the cache


def _rstd(x: np.ndarray, eps: float) -> np.ndarray:
    """1 / sqrt(mean(x^2) + eps) of each row."""
    mean_square = np.vecdot(x, x)
    mean_square /= x.dtype.type(x.shape[-1])
    mean_square += x.dtype.type(eps)
    np.sqrt(mean_square, out=mean_square)
    return np.divide(x.dtype.type(1), mean_square, out=mean_square)


def _normalise(
    out: np.ndarray, rstd: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float
) -> None:
    """out and rstd from x in the computing precision; out may have a narrower type."""
    rstd[...] = _rstd(x, eps)
    if out.dtype == x.dtype:
        np.multiply(x, rstd[:, None], out=out)
        out *= weight
    else:
        rounded = (x * rstd[:, None]).astype(out.dtype)
        out[...] = compute(rounded) * compute(weight)


def rmsnorm_forward(
    out: np.ndarray | None,
    rstd: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    eps: float,
    rows: int,
    C: int,
    abs_max: np.ndarray | None = None,
    codes: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    saturated: np.ndarray | None = None,
) -> None:
    """rstd = 1 / sqrt(mean(x^2) + eps); out = T(T(rstd * x) * weight)."""
    out = np.empty_like(x) if out is None else out
    _normalise(out, rstd, compute(x), weight, eps)
    update_abs_max(abs_max, out)
    emit_fp8(codes, None, scale, saturated, out)


def rmsnorm_forward_residual(
    residual_out: np.ndarray,
    out: np.ndarray | None,
    rstd: np.ndarray,
    residual: np.ndarray,
    branch: np.ndarray,
    weight: np.ndarray,
    eps: float,
    rows: int,
    C: int,
    abs_max: np.ndarray | None = None,
    codes: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    saturated: np.ndarray | None = None,
) -> None:
    """residual_out = T(residual + branch), then the norm of the rounded sum."""
    if residual_out.dtype == compute(residual).dtype:
        np.add(residual, branch, out=residual_out)
    else:
        residual_out[...] = compute(residual) + compute(branch)
    out = np.empty_like(residual_out) if out is None else out
    _normalise(out, rstd, compute(residual_out), weight, eps)
    update_abs_max(abs_max, out)
    emit_fp8(codes, None, scale, saturated, out)


def rmsnorm_post(
    out: np.ndarray,
    rstd: np.ndarray,
    x: np.ndarray,
    residual: np.ndarray | None,
    weight: np.ndarray,
    eps: float,
    rows: int,
    C: int,
    abs_max: np.ndarray | None = None,
    codes: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    saturated: np.ndarray | None = None,
) -> None:
    """out = T(residual + T(rstd * x * weight)), or without the sum."""
    wide = compute(x)
    rstd[...] = _rstd(wide, eps)
    normalised = wide * rstd[:, None]
    normalised *= compute(weight)
    if residual is None:
        out[...] = normalised
    else:
        out[...] = compute(residual) + compute(normalised.astype(out.dtype, copy=False))
    update_abs_max(abs_max, out)
    emit_fp8(codes, None, scale, saturated, out)


def rmsnorm_backward(
    d_x: np.ndarray,
    partial: np.ndarray,
    d_out: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    rstd: np.ndarray,
    d_residual: np.ndarray | None,
    rows: int,
    C: int,
    abs_max: np.ndarray | None = None,
    codes: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    saturated: np.ndarray | None = None,
) -> None:
    """d_x from d_out; the rows of partial (any number, C) add up to the weight's gradient."""
    weight = compute(weight)
    partial[...] = 0
    step = max(1, BLOCK // C)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        past = None if d_residual is None else compute(d_residual[part])
        inputs = (compute(d_out[part]), compute(x[part]), weight, rstd[part], past)
        partial[0] += _input_gradient(d_x[part], *inputs)
        update_abs_max(abs_max, d_x[part])
    emit_fp8(codes, None, scale, saturated, d_x)


def _input_gradient(
    d_x: np.ndarray,
    d_out: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    rstd: np.ndarray,
    past: np.ndarray | None,
) -> np.ndarray:
    """d_x of a few rows; returns their sum for the weight. All but d_x in F32 (or F64).

    rstd * (d_out * weight - x_hat * mean(d_out * weight * x_hat)) + past
    """
    product = d_out * x
    d_weight = rstd @ product
    slope = product @ weight
    slope *= rstd * rstd * rstd / x.dtype.type(weight.size)
    total = np.multiply(d_out, weight, out=product)
    total *= rstd[:, None]
    if past is not None:
        total += past
    total -= x * slope[:, None]
    d_x[...] = total
    return d_weight


def rmsnorm_backward_weight(
    d_weight: np.ndarray,
    partial: np.ndarray,
    scalars: np.ndarray,
    num_partials: int,
    C: int,
    accumulate: int,
    salt: int,
) -> None:
    """d_weight = or += the sum of partial over its rows."""
    store_gradient(d_weight, partial.sum(0), scalars, bool(accumulate), salt)
