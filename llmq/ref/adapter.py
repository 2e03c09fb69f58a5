"""Reference of low-rank adapters' B: into the one matrix that a product takes, and back; and of the
norms and magnitudes of adapted rows (DoRA)."""

import numpy as np

from llmq.ref.common import compute

# name: (rows of the matrix, rank, starts and stops of the rows that have an adapter each)
CASES = {
    "one": (40, 8, 0, 40),
    "padded": (24, 3, 0, 24),
    "three": (64, 4, 0, 32, 32, 48, 48, 64),
    "two_of_three": (64, 5, 0, 32, 48, 64),
    "four": (64, 4, 0, 16, 16, 40, 40, 48, 48, 64),
    "last": (48, 16, 24, 48),
    "qwen7b_qkv": (4608, 16, 0, 3584, 3584, 4096, 4096, 4608),
    "qwen7b_up": (37888, 16, 0, 18944, 18944, 37888),
}


def _blocks(rank: int, scales: tuple[float, ...], *spans: int) -> list[tuple]:
    """For each span its rows of the whole, its columns there, its rows of B, and its scale."""
    blocks, done = [], 0
    for number, (start, stop) in enumerate(zip(spans[::2], spans[1::2], strict=True)):
        if start < stop:
            columns = slice(number * rank, (number + 1) * rank)
            of_b, scale = slice(done, done + stop - start), np.float32(scales[number])
            blocks.append((slice(start, stop), columns, of_b, scale))
            done += stop - start
    return blocks


def _matrices(whole: np.ndarray, b: np.ndarray, period: int) -> tuple[np.ndarray, np.ndarray]:
    """Both, one matrix after the other."""
    count = len(whole) // period
    return whole.reshape(count, period, -1), b.reshape(count, len(b) // count, -1)


def adapter_expand(whole, b, scale0, scale1, scale2, scale3, rank, columns, rows, period, *spans):
    """whole (rows, columns) = its scale * B of each span in columns of its own, zero elsewhere.

    period: rows of one matrix, of which all have the spans. spans: start and stop of four; empty
    where there are fewer.
    """
    whole[...] = 0
    wholes, parts = _matrices(whole, b, period)
    scales = (scale0, scale1, scale2, scale3)
    for of_whole, its_columns, of_b, scale in _blocks(rank, scales, *spans):
        wholes[:, of_whole, its_columns] = compute(parts[:, of_b]) * scale


def adapter_collect(b, whole, scale0, scale1, scale2, scale3, rank, columns, rows, period, *spans):
    """b (rows, rank) = its scale * what adapter_expand takes from there."""
    wholes, parts = _matrices(whole, b, period)
    scales = (scale0, scale1, scale2, scale3)
    for of_whole, its_columns, of_b, scale in _blocks(rank, scales, *spans):
        parts[:, of_b] = compute(wholes[:, of_whole, its_columns]) * scale


def adapter_norms(norms, w, a, b, scale0, scale1, scale2, scale3, rank, rows, K, *spans):
    """norms (rows,) = |w + its scale * B A| of each row of w (rows, K) in a span, elsewhere 0."""
    norms[...] = 0
    scales = (scale0, scale1, scale2, scale3)
    for of_w, of_a, of_b, scale in _blocks(rank, scales, *spans):
        sums = compute(w[of_w]) + (scale * compute(b[of_b])) @ compute(a[of_a])
        norms[of_w] = np.sqrt((sums * sums).sum(axis=1))


def adapter_columns(out, x, y, norms, magnitudes, bias, rows, columns):
    """out (rows, columns) = x * magnitudes / norms + bias, x + bias where norms are 0; with y
    x * y / norms, and 0 there."""
    there = norms > 0
    factors = np.ones_like(norms) if magnitudes is None else magnitudes.copy()
    np.divide(factors, norms, out=factors, where=there)
    factors[~there] = 0 if y is not None else 1
    product = compute(x) * factors
    if y is not None:
        product = product * compute(y)
    out[...] = product if bias is None else product + compute(bias)
