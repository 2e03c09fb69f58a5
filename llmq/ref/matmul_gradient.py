"""Reference of a product that is added to a gradient: the product, and the sum behind it."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import (
    BF16,
    adapted_product,
    compute,
    decode_fp8,
    gradient_seed,
    random_bits,
    round_stochastic,
)

# name: (M, N, K): of d_W = d_out^T @ x.
CASES = {
    "small": (16, 64, 64),
    "tiles": (304, 336, 528),  # edges of tiles, and a last part of less than a step
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
    scale_a: np.ndarray,
    scale_b: np.ndarray,
    scalars: np.ndarray,
    accumulate: int,
    salt: int,
    M: int,
    N: int,
    K: int,
    part_steps: int,
) -> None:
    """d (M,N) = or += scale_a * scale_b * (a (M,K) @ b (N,K)^T), rounded to BF16.

    A sum is rounded stochastically. part_steps: how a GPU sums; here it is in F32.
    """
    seed = gradient_seed(scalars, salt)
    for rows, total in adapted_product(a, decode_fp8(b).T, None, None, scale_a, scale_b):
        product = total.astype(BF16)
        if accumulate:
            index = np.arange(total.size, dtype=np.uint64).reshape(-1, N) + np.uint64(
                rows.start * N
            )
            total = compute(d[rows]) + compute(product)
            product = round_stochastic(total, random_bits(seed, index))
        d[rows] = product
