"""Reference of the product of signed bytes: NumPy's BLAS, in pieces of which F32 holds each sum."""

import numpy as np

from llmq.ref.common import compute

# name: (M, N, K), out = a (M,K) @ b (N,K)^T. Forward x @ W^T, d_x = d_out @ (W^T)^T,
# d_W = d_out^T @ (x^T)^T: each operand is there in the layout that its product needs.
CASES = {
    "small": (16, 16, 32),
    "odd_k": (32, 48, 80),
    "wide": (48, 144, 64),
    "deep": (32, 16, 1104),
    "tall": (608, 32, 16),
    "qwen05b_up_forward": (32768, 9728, 896),
    "qwen05b_up_d_input": (32768, 896, 9728),
    "qwen05b_up_d_weight": (9728, 896, 32768),
    "qwen15b_qkv_forward": (32768, 2048, 1536),
    "qwen15b_up_forward": (32768, 17920, 1536),
    "qwen15b_down_d_weight": (1536, 8960, 32768),
}

EXACT = 1024  # products of two codes, at most 127 * 127 each, whose sum is below 2^24
ROWS = 1024  # of a, at a time


def matmul_int8(out, a, b, scale_a, scale_b, bias, M, N, K, *, accumulate):
    """out (M,N) = (a (M,K) @ b (N,K)^T * scale_a) * scale_b [+ bias (N,)] [+ out].

    The sums are exact; the rest is computed in F32 and rounded to out once.
    """
    right = b.astype(np.float32).T
    for start in range(0, M, ROWS):
        rows = slice(start, start + ROWS)
        left = a[rows].astype(np.float32)
        total = left[:, :EXACT] @ right[:EXACT]
        if K > EXACT:
            total = total.astype(np.int32)
            for k in range(EXACT, K, EXACT):
                total += (left[:, k : k + EXACT] @ right[k : k + EXACT]).astype(np.int32)
            total = total.astype(np.float32)
        total *= scale_a[rows, None]
        total *= scale_b
        if bias is not None:
            total += compute(bias)
        if accumulate:
            total += compute(out[rows])
        out[rows] = total
