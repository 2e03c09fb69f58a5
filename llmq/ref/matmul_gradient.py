"""Reference of a product that is added to a gradient: the product, and the sum behind it."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import BF16
from llmq.ref.matmul import matmul, matmul_fp8
from llmq.ref.reduce import reduce_sum

# name: (M, N, K): of d_W = d_out^T @ x.
CASES = {
    "small": (16, 64, 64),
    "tiles": (304, 208, 656),  # edges of tiles, and a last part of a step and a half
    "qwen05b_up": (9728, 896, 32768),
    "qwen15b_qkv": (2048, 1536, 32768),
    "qwen15b_up": (17920, 1536, 32768),
    "qwen15b_down": (1536, 8960, 32768),
    "qwen7b_down": (3584, 18944, 16384),
}


def matmul_gradient(
    d: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    scale_a: np.ndarray | None,
    scale_b: np.ndarray | None,
    scalars: np.ndarray,
    accumulate: int,
    salt: int,
    M: int,
    N: int,
    K: int,
    part_steps: int,
) -> None:
    """d (M,N) = or += scale_a * scale_b * (a (M,K) @ b (N,K)^T), rounded to BF16.

    Without scales a is (K,M) and b (K,N). A sum is rounded stochastically. part_steps: how a GPU
    sums; here it is in F32.
    """
    product = np.empty((M, N), BF16) if accumulate else d
    if scale_a is None:
        matmul(product, a, b, None, None, None, M, N, K, trans_a=1, trans_b=0, accumulate=0)
    else:
        nothing = (None,) * 5  # bias, codes, addend, workspace
        matmul_fp8(
            product, a, b, scale_a, scale_b, *nothing, M, N, K, accumulate=0, fast_accumulation=0
        )
    if accumulate:
        reduce_sum(d, product, *[None] * 7, scalars, 1, salt, 0, M * N)
