"""Reference of the product of queries, keys and values with RoPE behind it: NumPy's BLAS."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import adapted_product, compute, decode_fp8, turn_heads

# name: (B, T, Hq, Hkv, Hd, K, R)
CASES = {
    "head_64": (2, 72, 2, 1, 64, 208, 0),
    "head_128": (1, 304, 3, 2, 128, 144, 40),
    "qwen05b": (32, 1024, 14, 2, 64, 896, 0),
    "qwen15b": (32, 1024, 12, 2, 128, 1536, 0),
    "qwen7b": (16, 1024, 28, 4, 128, 3584, 0),
}


def matmul_rope(
    qkv: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    h: np.ndarray | None,
    tail: np.ndarray | None,
    scale_a: np.ndarray | None,
    scale_b: np.ndarray | None,
    bias: np.ndarray | None,
    table: np.ndarray,
    starts: np.ndarray | None,
    M: int,
    N: int,
    K: int,
    seq_length: int,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """qkv (M,N) = scale_a * scale_b * (a (M,K) @ b (N,K)^T) [+ h (M,R) @ tail (N,R)^T]
    [+ bias (N)], computed in F32 and rounded to qkv; then rope_forward of that.
    """
    right = compute(b) if scale_a is None else decode_fp8(b)
    low = None if tail is None else compute(tail).T
    flat = qkv.reshape(M, N)
    for rows, total in adapted_product(a, right.T, h, low, scale_a, scale_b):
        if bias is not None:
            total += compute(bias)
        flat[rows] = total
    turn_heads(qkv, table, num_heads, num_kv_heads, 0, starts, 1)
