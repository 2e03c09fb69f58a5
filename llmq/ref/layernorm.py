"""Reference of LayerNorm, alone and fused with the residual addition."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import compute, emit_fp8, store_gradient, update_abs_max

# name: (rows, C)
CASES = {
    "one_row": (1, 64),
    "narrow": (37, 72),
    "warp_per_row": (19, 768),
    "two_warps_per_row": (9, 1600),
    "widest": (5, 8192),
    "gpt2": (32768, 768),
    "gpt2_xl": (16384, 1600),
}

BLOCK = 1 << 17  # elements of the rows worked on at a time, so that temporaries stay in the cache


def _normalise(
    out: np.ndarray | None,
    mean: np.ndarray,
    rstd: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    eps: float,
) -> None:
    """out, mean and rstd from x in the computing precision; out may have a narrower type."""
    count = x.dtype.type(x.shape[-1])
    np.divide(x @ np.ones(x.shape[-1], x.dtype), count, out=mean)  # BLAS is the fastest row sum
    centred = np.subtract(x, mean[:, None], out=out if out.dtype == x.dtype else None)
    variance = np.vecdot(centred, centred)
    variance /= count
    variance += x.dtype.type(eps)
    np.sqrt(variance, out=variance)
    np.divide(x.dtype.type(1), variance, out=rstd)
    centred *= rstd[:, None]
    centred *= compute(weight)
    centred += compute(bias)
    if centred is not out:
        out[...] = centred


def layernorm_forward(
    out: np.ndarray | None,
    mean: np.ndarray,
    rstd: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    eps: float,
    rows: int,
    C: int,
    abs_max: np.ndarray | None = None,
    codes: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    saturated: np.ndarray | None = None,
) -> None:
    """rstd = 1 / sqrt(variance(x) + eps); out = T((x - mean) * rstd * weight + bias)."""
    out = np.empty_like(x) if out is None else out
    _normalise(out, mean, rstd, compute(x), weight, bias, eps)
    update_abs_max(abs_max, out)
    emit_fp8(codes, None, scale, saturated, out)


def layernorm_forward_residual(
    residual_out: np.ndarray,
    out: np.ndarray | None,
    mean: np.ndarray,
    rstd: np.ndarray,
    residual: np.ndarray,
    branch: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
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
    _normalise(out, mean, rstd, compute(residual_out), weight, bias, eps)
    update_abs_max(abs_max, out)
    emit_fp8(codes, None, scale, saturated, out)


def layernorm_backward(
    d_x: np.ndarray,
    partial: np.ndarray,
    d_out: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    d_residual: np.ndarray | None,
    rows: int,
    C: int,
    abs_max: np.ndarray | None = None,
    codes: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    saturated: np.ndarray | None = None,
) -> None:
    """d_x from d_out; partial (2, any, C) adds up to the gradients of weight and bias."""
    weight = compute(weight)
    partial[...] = 0
    step = max(1, BLOCK // C)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        past = None if d_residual is None else compute(d_residual[part])
        inputs = (compute(d_out[part]), compute(x[part]), weight, mean[part], rstd[part], past)
        for total, value in zip(partial, _input_gradient(d_x[part], *inputs), strict=True):
            total[0] += value
        update_abs_max(abs_max, d_x[part])
    emit_fp8(codes, None, scale, saturated, d_x)


def _input_gradient(
    d_x: np.ndarray,
    d_out: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    past: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """d_x of a few rows; returns their sums for weight and bias. All but d_x in F32 (or F64).

    rstd * (d_norm - mean(d_norm) - x_hat * mean(d_norm * x_hat)) + past, d_norm = d_out * weight
    """
    ones, count = np.ones(len(x), x.dtype), x.dtype.type(weight.size)
    x_hat = x - mean[:, None]
    x_hat *= rstd[:, None]
    total = d_out * x_hat
    sums = ones @ total, ones @ d_out
    slope = total @ weight
    slope /= count
    offset = d_out @ weight
    offset /= count
    np.multiply(d_out, weight, out=total)
    total -= offset[:, None]
    x_hat *= slope[:, None]
    total -= x_hat
    total *= rstd[:, None]
    if past is not None:
        total += past
    d_x[...] = total
    return sums


def layernorm_backward_parameter(
    d_parameter: np.ndarray,
    partial: np.ndarray,
    scalars: np.ndarray,
    num_partials: int,
    C: int,
    accumulate: int,
    salt: int,
) -> None:
    """d_parameter = or += the sum of partial (num_partials, C) over its rows."""
    store_gradient(d_parameter, partial.sum(0), scalars, bool(accumulate), salt)
