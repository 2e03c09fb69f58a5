"""Reference of the product of logits with their exponentials behind it: NumPy's BLAS, and exp."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import BF16, adapted_product, compute

TILE = 192  # columns that have a sum of their own

# name: (M, N, K, vocab)
CASES = {
    "small": (16, 96, 64, 90),
    "tiles": (304, 600, 72, 577),  # a vocabulary that ends within 16 bytes, edges of tiles
    "qwen05b": (32768, 151936, 896, 151936),
    "qwen15b": (8192, 151936, 1536, 151936),
}


def matmul_exp(
    e: np.ndarray,
    sums: np.ndarray,
    target_logits: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    shift: np.ndarray,
    targets: np.ndarray,
    M: int,
    N: int,
    K: int,
    vocab: int,
) -> None:
    """e (M,N) = exp(a (M,K) @ b (N,K)^T - shift (M)), of logits that are rounded to BF16.

    Columns >= vocab are 0. sums (ceil(N / TILE), M): of e over TILE columns each, before it is
    rounded. target_logits (M): where targets (M) are not negative.
    """
    edges = np.arange(0, N, TILE)
    for rows, total in adapted_product(a, compute(b).T, None, None, None, None):
        x = compute(total.astype(BF16))
        counted = np.flatnonzero(targets[rows] >= 0)
        target_logits[rows][counted] = x[counted, targets[rows][counted]]
        x -= shift[rows][:, None]
        with np.errstate(over="ignore"):
            np.exp(x, out=x)
            x[:, vocab:] = 0
            sums[:, rows] = np.add.reduceat(x, edges, axis=1).T
            e[rows] = x
