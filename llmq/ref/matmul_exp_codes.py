"""References of cu/matmul_exp_codes.cu: NumPy's BLAS, exp, and codes of it."""

from __future__ import annotations

from collections.abc import Iterator

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
    for rows, x in _logits(a, b, scale_a, scale_b):
        counted = np.flatnonzero(targets[rows] >= 0)
        target_logits[rows][counted] = x[counted, targets[rows][counted]]
        _exponentials(e[rows], x, shift[rows], targets[rows], vocab)
        sums[:, rows] = _by_tiles(np.add, x)


def exp_codes_again(
    e: np.ndarray,
    sums: np.ndarray,
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
    """The same of rows[1 : 1 + rows[0]] of e, sums, shift and targets, from the first rows of a."""
    listed = rows[1 : 1 + rows[0]]
    for some, x in _logits(a[: len(listed)], b, scale_a, scale_b):
        of_e = np.empty(x.shape, e.dtype)
        _exponentials(of_e, x, shift[listed[some]], targets[listed[some]], vocab)
        e[listed[some]] = of_e
        sums[:, listed[some]] = _by_tiles(np.add, x)


def exp_codes_most(
    most: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    scale_a: np.ndarray,
    scale_b: np.ndarray,
    rows: np.ndarray,
    M: int,
    N: int,
    K: int,
    vocab: int,
) -> None:
    """most (ceil(N / TILE), M): of the same rows the largest logits of columns < vocab by tiles."""
    listed = rows[1 : 1 + rows[0]]
    for some, x in _logits(a[: len(listed)], b, scale_a, scale_b):
        x[:, vocab:] = -np.inf
        most[:, listed[some]] = _by_tiles(np.maximum, x)


def _logits(
    a: np.ndarray, b: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray
) -> Iterator[tuple[slice, np.ndarray]]:
    """Rows of a, and their logits, rounded to BF16."""
    for rows, x in adapted_product(a, decode_fp8(b).T, None, None, scale_a, scale_b):
        yield rows, compute(x.astype(BF16))


def _by_tiles(reduce: np.ufunc, x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return reduce.reduceat(x, np.arange(0, x.shape[1], TILE), axis=1).T


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
