"""Reference of RMSNorm and LayerNorm, alone and fused with a residual addition.

A mean that is not None selects LayerNorm, else the norm is RMSNorm. results: abs_max, codes, scale
and saturated, each of which may be None, or nothing. offset: 1 + weight takes the place of weight,
and the result is rounded once.
"""

import numpy as np

from llmq.base.products import product
from llmq.ref.common import compute, emit_fp8, norm_factor, update_abs_max

# name: (rows, C, whether it is LayerNorm)
CASES = {
    "one_row": (1, 64, False),
    "narrow": (37, 72, False),
    "warp_per_row": (19, 896, False),
    "two_warps_per_row": (9, 1536, False),
    "four_warps_per_row": (11, 3584, False),
    "widest": (5, 8192, False),
    "qwen05b": (32768, 896, False),
    "qwen15b": (32768, 1536, False),
    "qwen7b": (16384, 3584, False),
    "layer_one_row": (1, 64, True),
    "layer_narrow": (37, 72, True),
    "layer_warp_per_row": (19, 768, True),
    "layer_two_warps_per_row": (9, 1600, True),
    "layer_widest": (5, 8192, True),
    "gpt2": (32768, 768, True),
    "gpt2_xl": (16384, 1600, True),
}

BLOCK = 1 << 17  # elements per block of rows, so that temporaries stay in the cache


def _rstd(x: np.ndarray, eps: float) -> np.ndarray:
    """1 / sqrt(mean(x^2) + eps) of each row."""
    mean_square = np.vecdot(x, x)
    mean_square /= x.dtype.type(x.shape[-1])
    mean_square += x.dtype.type(eps)
    np.sqrt(mean_square, out=mean_square)
    return np.divide(x.dtype.type(1), mean_square, out=mean_square)


def _rms_norm(
    out: np.ndarray, rstd: np.ndarray, x: np.ndarray, factor: np.ndarray, eps: float, once: int
) -> None:
    """out and rstd from x in the computing precision; out may have a narrower type."""
    rstd[...] = _rstd(x, eps)
    if out.dtype == x.dtype:
        np.multiply(x, rstd[:, None], out=out)
        out *= factor
        return
    x_hat = x * rstd[:, None]
    x_hat = x_hat if once else compute(x_hat.astype(out.dtype))
    x_hat *= factor
    out[...] = x_hat


def _layer_norm(
    out: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    eps: float,
) -> None:
    """out, mean and rstd from x in the computing precision; out may have a narrower type."""
    count = x.dtype.type(x.shape[-1])
    ones = np.ones(x.shape[-1], x.dtype)
    np.divide(product(x, ones), count, out=mean)  # BLAS is the fastest row sum
    centred = np.subtract(x, mean[:, None], out=out if out.dtype == x.dtype else None)
    rstd[...] = _rstd(centred, eps)
    centred *= rstd[:, None]
    centred *= compute(weight)
    centred += compute(bias)
    if centred is not out:
        out[...] = centred


def _emit(
    out: np.ndarray,
    abs_max: np.ndarray | None = None,
    codes: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    saturated: np.ndarray | None = None,
) -> None:
    """Write the further results from out: abs_max, FP8 codes and the count of saturated codes."""
    update_abs_max(abs_max, out)
    emit_fp8(codes, None, scale, saturated, out)


def norm_forward(out, mean, rstd, x, weight, bias, eps, rows, C, *results, offset=0, round_once=0):
    """out = T(T(rstd * x) * weight), with rstd = 1 / sqrt(mean(x^2) + eps). LayerNorm: out = T((x -
    mean) * rstd * weight + bias), with rstd = 1 / sqrt(variance(x) + eps)."""
    out = np.empty_like(x) if out is None else out
    if mean is None:
        once = offset or round_once
        _rms_norm(out, rstd, compute(x), norm_factor(weight, offset), eps, once)
    else:
        _layer_norm(out, mean, rstd, compute(x), weight, bias, eps)
    _emit(out, *results)


def norm_forward_residual(
    residual_out, out, mean, rstd, residual, branch, weight, bias, eps, rows, C, *results, offset=0,
    round_once=0,
):  # fmt: skip
    """residual_out = T(residual + branch), then the norm of the rounded sum."""
    if residual_out.dtype == compute(residual).dtype:
        np.add(residual, branch, out=residual_out)
    else:
        residual_out[...] = compute(residual) + compute(branch)
    args = (out, mean, rstd, residual_out, weight, bias, eps, rows, C, *results)
    norm_forward(*args, offset=offset, round_once=round_once)


def norm_post(out, rstd, x, residual, weight, eps, rows, C, *results, offset=0):
    """out = T(residual + T(rstd * x * weight)), or T(rstd * x * weight) if residual is None."""
    out = np.empty_like(x) if out is None else out
    normalised = np.empty_like(out)
    _rms_norm(normalised, rstd, compute(x), norm_factor(weight, offset), eps, once=1)
    out[...] = normalised if residual is None else compute(residual) + compute(normalised)
    _emit(out, *results)


def norm_backward(
    d_x, partial, d_out, x, weight, mean, rstd, d_residual, rows, C, abs_max=None, *codes, offset=0
):
    """Write d_x from d_out. partial: (1 or 2, any number, C), whose sums over the second axis are
    the gradients of weight and bias; None: these are not wanted."""
    weight = norm_factor(weight, offset)
    partial = np.empty((0, 1, C), np.float32) if partial is None else partial
    partial[...] = 0
    step = max(1, BLOCK // C)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        past = None if d_residual is None else compute(d_residual[part])
        inputs = (compute(d_out[part]), compute(x[part]), weight)
        if mean is None:
            sums = _rms_gradient(d_x[part], *inputs, rstd[part], past)
        else:
            sums = _layer_gradient(d_x[part], *inputs, mean[part], rstd[part], past)
        for total, value in zip(partial, sums, strict=len(partial) > 0):
            total[0] += value
        update_abs_max(abs_max, d_x[part])
    _emit(d_x, None, *codes)


def _rms_gradient(
    d_x: np.ndarray,
    d_out: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    rstd: np.ndarray,
    past: np.ndarray | None,
) -> tuple[np.ndarray]:
    """Write d_x of a few rows; return the rows' sum for the gradient of weight. past: d_residual or
    None. All arrays but d_x are F32 (or F64).

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
    return (d_weight,)


def _layer_gradient(
    d_x: np.ndarray,
    d_out: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    past: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Write d_x of a few rows; return the rows' sums for the gradients of weight and bias. past:
    d_residual or None. All arrays but d_x are F32 (or F64).

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
