"""Reference of the RMSNorm of values, which has no weights.

keys = 1: values are the keys of the product before their normalization.
"""

import numpy as np

from llmq.ref.common import compute

# name: (B, T, Hq, Hkv, Hd, whether values are keys)
CASES = {
    "one_head": (1, 1, 1, 1, 8, False),
    "head_80": (2, 5, 4, 2, 80, False),
    "keys_80": (2, 5, 4, 2, 80, True),
    "keys_512": (1, 3, 3, 1, 512, True),
    "gemma4_31b": (4, 1024, 32, 16, 256, False),
    "gemma4_31b_full": (4, 1024, 32, 4, 512, True),
}


def value_norm_forward(qkv, rstd, product, eps, tokens, num_heads, num_kv_heads, *, keys=0):
    """Value heads of qkv become T(rstd * head), rstd = 1 / sqrt(mean(head^2) + eps). keys: `head`
    is a key head of product, and all heads of product are copied to qkv first."""
    first = num_heads + num_kv_heads
    if keys:
        qkv[:, :, :first] = product.reshape(*qkv.shape[:2], first, -1)
    x = compute(qkv[:, :, num_heads:first] if keys else qkv[:, :, first:])
    real = x.dtype.type
    rstd[...] = real(1) / np.sqrt(np.vecdot(x, x) / real(x.shape[-1]) + real(eps))
    qkv[:, :, first:] = x * rstd[..., None]


def value_norm_backward(d_product, d_qkv, qkv, rstd, tokens, num_heads, num_kv_heads, *, keys=0):
    """Value heads d of d_qkv become T(rstd * (d - v * mean(d * v))), v: value heads of qkv. keys:
    instead d_product gets the query heads of d_qkv, and its key heads plus these gradients."""
    first = num_heads + num_kv_heads
    v, d = compute(qkv[:, :, first:]), compute(d_qkv[:, :, first:])
    slope = np.vecdot(d, v) / d.dtype.type(d.shape[-1])
    d_x = (d - v * slope[..., None]) * rstd[..., None]
    if not keys:
        d_qkv[:, :, first:] = d_x
        return
    out = d_product.reshape(*d_qkv.shape[:2], first, -1)
    out[:, :, :num_heads] = d_qkv[:, :, :num_heads]
    out[:, :, num_heads:] = compute(d_qkv[:, :, num_heads:first]) + d_x
