"""References of cu/matmul_exp_codes.cu: NumPy's BLAS, exp, and codes of it."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import BF16, adapted_product, compute, decode_fp8, encode_fp8

TILE = 192  # columns that have a sum of their own

# name: (M, N, K, vocab)
CASES = {
    "small": (16, 96, 64, 90),
    "tiles": (304, 608, 144, 577),  # a vocabulary that ends within 16 bytes, edges of tiles
    "qwen05b": (32768, 151936, 896, 151936),
    "qwen15b": (8192, 151936, 1536, 151936),
}


def matmul_exp_codes(
    e: np.ndarray,
    sums: np.ndarray,
    target_logits: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    scale_a: np.ndarray,
    scale_b: np.ndarray,
    shift: np.ndarray,
    targets: np.ndarray,
    M: int,
    N: int,
    K: int,
    vocab: int,
) -> None:
    """e (M,N) = exp(scale_a * scale_b * (a (M,K) @ b (N,K)^T) - shift (M)), of logits that are
    rounded to BF16.

    Columns >= vocab are 0, and so is the one of targets (M), whose logits are target_logits (M);
    of negative targets there is none. sums (ceil(N / TILE), M): of e over TILE columns each, before
    it is rounded.
    """
    edges = np.arange(0, N, TILE)
    for rows, x in adapted_product(a, decode_fp8(b).T, None, None, scale_a, scale_b):
        x = compute(x.astype(BF16))
        counted = np.flatnonzero(targets[rows] >= 0)
        target_logits[rows][counted] = x[counted, targets[rows][counted]]
        _exponentials(e[rows], x, shift[rows], targets[rows], vocab)
        sums[:, rows] = np.add.reduceat(x, edges, axis=1).T


def exp_codes_again(
    e: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    scale_a: np.ndarray,
    scale_b: np.ndarray,
    shift: np.ndarray,
    targets: np.ndarray,
    rows: np.ndarray,
    M: int,
    N: int,
    K: int,
    vocab: int,
) -> None:
    """The same of rows[1 : 1 + rows[0]] of e, shift and targets, from the first rows of a."""
    listed = rows[1 : 1 + rows[0]]
    for some, x in adapted_product(a[: len(listed)], decode_fp8(b).T, None, None, scale_a, scale_b):
        x = compute(x.astype(BF16))
        of_e = np.empty(x.shape, e.dtype)
        _exponentials(of_e, x, shift[listed[some]], targets[listed[some]], vocab)
        e[listed[some]] = of_e


def _exponentials(
    e: np.ndarray, x: np.ndarray, shift: np.ndarray, targets: np.ndarray, vocab: int
) -> None:
    """x becomes exp(x - shift), and e its codes."""
    x -= shift[:, None]
    with np.errstate(over="ignore"):
        np.exp(x, out=x)
    x[:, vocab:] = 0
    counted = np.flatnonzero(targets >= 0)
    x[counted, targets[counted]] = 0
    encode_fp8(e.view(np.uint8), x, np.float32(1), e.dtype)
