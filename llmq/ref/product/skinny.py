"""Products of few rows: reference of llmq/cu/product/skinny.cu."""

import numpy as np

from llmq.ref.common import compute

# M, N, K
CASES = {
    "one_row": (1, 48, 64),
    "ragged": (5, 37, 104),
    "deep": (3, 16, 4600),
    "most": (16, 72, 1032),
    "qwen05b_up": (1, 9728, 896),
    "qwen05b_head": (1, 151936, 896),
    "qwen7b_qkv": (1, 4608, 3584),
    "qwen7b_up": (1, 37888, 3584),
    "qwen7b_down": (1, 3584, 18944),
    "qwen7b_up_16": (16, 37888, 3584),
}


def skinny(out, a, b, bias, addend, M, N, K, alpha):
    """out (M, N) = alpha * a (M, K) @ b (N, K)^T [+ bias (N,)] [+ addend (M, N)], summed in F32."""
    total = compute(a) @ compute(b).T
    total *= np.float32(alpha)
    for added in (bias, addend):
        if added is not None:
            total += compute(added)
    out[...] = total
