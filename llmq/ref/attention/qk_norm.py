"""Reference of the RMSNorm of queries and keys.

wide: one norm over all query channels of a token, and one over all key channels; else a norm for
every head.
"""

from collections.abc import Iterator

import numpy as np

from llmq.ref.common import compute, norm_factor

# name: (B, T, Hq, Hkv, Hd, whether it is wide)
CASES = {
    "one_token": (1, 1, 1, 1, 64, False),
    "head_64": (2, 5, 4, 2, 64, False),
    "head_80": (1, 7, 3, 1, 80, False),
    "head_96": (1, 3, 5, 5, 96, False),
    "head_128": (3, 7, 4, 2, 128, False),
    "head_256": (1, 5, 3, 1, 256, False),
    "head_512": (1, 5, 3, 1, 512, False),
    "qwen3_06b": (32, 1024, 16, 8, 128, False),
    "qwen05b": (32, 1024, 14, 2, 64, False),
    "qwen15b": (32, 1024, 12, 2, 128, False),
    "wide_one_token": (1, 1, 1, 1, 64, True),
    "wide_warp_per_row": (2, 5, 4, 2, 64, True),
    "wide_two_warps_per_row": (1, 7, 12, 4, 128, True),
    "wide_four_warps_per_row": (1, 3, 40, 8, 80, True),
    "wide_widest": (1, 2, 64, 64, 128, True),
    "olmo2_1b": (16, 1024, 16, 16, 128, True),
    "olmo2_32b": (4, 1024, 40, 8, 128, True),
}


def _parts(num_heads: int, num_kv_heads: int, wide: int) -> Iterator[tuple[slice, slice]]:
    """For queries, then keys: the slice of their heads, and the slice of their rows in rstd."""
    heads = slice(num_heads), slice(num_heads, num_heads + num_kv_heads)
    yield from zip(heads, (slice(1), slice(1, 2)) if wide else heads, strict=True)


def qk_norm_forward(
    qkv, raw, rstd, q_weight, k_weight, eps, tokens, num_heads, num_kv_heads, query_blocks, *,
    wide=0, offset=0, rounded_once=0,
):  # fmt: skip
    """raw = the query and key heads of qkv; then their rows in qkv become T(T(rstd * row) *
    weight). With wide or rounded_once: T(rstd * row * weight); with offset: T(rstd * row * (1 +
    weight))."""
    raw[...] = qkv[:, :, : num_heads + num_kv_heads]
    parts, stats = _parts(num_heads, num_kv_heads, wide), rstd.reshape(tokens, -1)
    for (heads, rows), weight in zip(parts, (q_weight, k_weight), strict=True):
        x = compute(raw[:, :, heads]).reshape(tokens, -1, weight.size)
        real = x.dtype.type
        stats[:, rows] = real(1) / np.sqrt(np.vecdot(x, x) / real(weight.size) + real(eps))
        normalised = x * stats[:, rows, None]
        if not (wide or offset or rounded_once):
            normalised = compute(normalised.astype(qkv.dtype, copy=False))
        normalised *= norm_factor(weight, offset)
        qkv[:, :, heads] = normalised.reshape(raw[:, :, heads].shape)


def qk_norm_backward(
    d_qkv, q_partial, k_partial, raw, rstd, q_weight, k_weight, tokens, num_heads, num_kv_heads,
    query_blocks, *, wide=0, offset=0,
):  # fmt: skip
    """Write the gradient to the query and key heads of d_qkv in place. q_partial, k_partial (any
    number, row width): rows that add up to the weights' gradients, or None."""
    parts, stats = _parts(num_heads, num_kv_heads, wide), rstd.reshape(tokens, -1)
    given = ((q_weight, q_partial), (k_weight, k_partial))
    for (heads, rows), (weight, partial) in zip(parts, given, strict=True):
        d_out = compute(d_qkv[:, :, heads]).reshape(tokens, -1, weight.size)
        scale, factor = stats[:, rows, None], norm_factor(weight, offset)
        x_hat = compute(raw[:, :, heads]).reshape(tokens, -1, weight.size) * scale
        product = d_out * x_hat
        if partial is not None:
            partial[...] = 0
            partial[0] = product.sum(0).sum(0)
        # d(norm)/dx = rstd * (d_out * weight - x_hat * mean(d_out * weight * x_hat))
        slope = np.vecdot(product, factor)
        slope /= slope.dtype.type(weight.size)
        x_hat *= slope[..., None]
        np.multiply(d_out, factor, out=product)
        product -= x_hat
        product *= scale
        d_qkv[:, :, heads] = product.reshape(raw[:, :, heads].shape)
