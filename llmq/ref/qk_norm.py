"""Reference of the RMSNorm over every query and key head."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import compute

# name: (B, T, Hq, Hkv, Hd)
CASES = {
    "one_token": (1, 1, 1, 1, 64),
    "head_64": (2, 5, 4, 2, 64),
    "head_80": (1, 7, 3, 1, 80),
    "head_96": (1, 3, 5, 5, 96),
    "head_128": (3, 7, 4, 2, 128),
    "head_256": (1, 5, 3, 1, 256),
    "qwen3_06b": (32, 1024, 16, 8, 128),
    "qwen05b": (32, 1024, 14, 2, 64),
    "qwen15b": (32, 1024, 12, 2, 128),
}


def _head_weights(
    q_weight: np.ndarray, k_weight: np.ndarray, num_heads: int, num_kv_heads: int, offset: int
) -> np.ndarray:
    """What multiplies each query and key head, (Hq + Hkv, Hd), in the computing precision."""
    weights = np.empty((num_heads + num_kv_heads, q_weight.size), compute(q_weight).dtype)
    weights[:num_heads] = q_weight
    weights[num_heads:] = k_weight
    if offset:
        weights += 1
    return weights


def qk_norm_forward(
    qkv: np.ndarray,
    raw: np.ndarray,
    rstd: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    eps: float,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    query_blocks: int,
    *,
    offset: int = 0,
) -> None:
    """raw = the query and key heads of qkv, which become T(T(rstd * head) * weight).

    With offset T(rstd * head * (1 + weight)).
    """
    heads = qkv[:, :, : num_heads + num_kv_heads]
    raw[...] = heads
    x = compute(raw)
    real = x.dtype.type
    rstd[...] = real(1) / np.sqrt(np.vecdot(x, x) / real(x.shape[-1]) + real(eps))
    normalised = x * rstd[..., None]
    weights = _head_weights(q_weight, k_weight, num_heads, num_kv_heads, offset)
    if not offset:
        normalised = compute(normalised.astype(qkv.dtype, copy=False))
    heads[...] = normalised * weights


def qk_norm_backward(
    d_qkv: np.ndarray,
    partial: np.ndarray,
    raw: np.ndarray,
    rstd: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    query_blocks: int,
    *,
    offset: int = 0,
) -> None:
    """Query and key heads of d_qkv in place.

    partial (any, Hd): its first query_blocks rows add up to the gradient of the query weight, the
    others to that of the key weight.
    """
    heads = d_qkv[:, :, : num_heads + num_kv_heads]
    d_out, x_hat = compute(heads), compute(raw) * rstd[..., None]
    product = d_out * x_hat
    partial[...] = 0
    by_head = product.reshape(tokens, -1).sum(0).reshape(num_heads + num_kv_heads, -1)
    np.sum(by_head[:num_heads], axis=0, out=partial[0])
    np.sum(by_head[num_heads:], axis=0, out=partial[query_blocks])
    weights = _head_weights(q_weight, k_weight, num_heads, num_kv_heads, offset)
    # d(norm)/dx = rstd * (d_out * weight - x_hat * mean(d_out * weight * x_hat))
    slope = np.vecdot(product, weights)
    slope /= slope.dtype.type(x_hat.shape[-1])
    x_hat *= slope[..., None]
    np.multiply(d_out, weights, out=product)
    product -= x_hat
    product *= rstd[..., None]
    heads[...] = product
