"""Reference of low-rank adapters: copy several B to the one matrix that a product takes, and back;
and the norms and magnitudes of adapted rows (DoRA)."""

import numpy as np

from llmq.ref.common import compute, store_gradient

# name: (rows of the matrix, rank, start and stop of each adapter's rows)
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
    """For each span that is not empty: its rows and its columns of the whole matrix, its rows of B,
    and its scale."""
    blocks, done = [], 0
    for number, (start, stop) in enumerate(zip(spans[::2], spans[1::2], strict=True)):
        if start < stop:
            columns = slice(number * rank, (number + 1) * rank)
            of_b, scale = slice(done, done + stop - start), np.float32(scales[number])
            blocks.append((slice(start, stop), columns, of_b, scale))
            done += stop - start
    return blocks


def _matrices(whole: np.ndarray, b: np.ndarray, period: int) -> tuple[np.ndarray, np.ndarray]:
    """whole and b as (matrices, rows per matrix, columns). period: rows of a matrix of whole."""
    count = len(whole) // period
    return whole.reshape(count, period, -1), b.reshape(count, len(b) // count, -1)


def adapter_expand(whole, b, scale0, scale1, scale2, scale3, rank, columns, rows, period, *spans):
    """whole (rows, columns) = scale * B of each span, in the span's own columns, zero elsewhere.
    period: rows of one matrix; each matrix has all spans. spans: start and stop of four spans,
    unused spans are empty."""
    whole[...] = 0
    wholes, parts = _matrices(whole, b, period)
    scales = (scale0, scale1, scale2, scale3)
    for of_whole, its_columns, of_b, scale in _blocks(rank, scales, *spans):
        wholes[:, of_whole, its_columns] = compute(parts[:, of_b]) * scale


def adapter_collect(b, whole, scale0, scale1, scale2, scale3, rank, columns, rows, period, *spans):
    """b (rows, rank) = the blocks of whole, each times its scale: the transposed operation of
    adapter_expand."""
    wholes, parts = _matrices(whole, b, period)
    scales = (scale0, scale1, scale2, scale3)
    for of_whole, its_columns, of_b, scale in _blocks(rank, scales, *spans):
        parts[:, of_b] = compute(wholes[:, of_whole, its_columns]) * scale


def adapter_norms(norms, w, a, b, scale0, scale1, scale2, scale3, rank, rows, K, *spans):
    """norms (rows,) = |w + scale * B A| for each row of w (rows, K) in a span, with the span's
    scale; 0 outside spans."""
    norms[...] = 0
    scales = (scale0, scale1, scale2, scale3)
    for of_w, of_a, of_b, scale in _blocks(rank, scales, *spans):
        sums = compute(w[of_w]) + (scale * compute(b[of_b])) @ compute(a[of_a])
        norms[of_w] = np.sqrt((sums * sums).sum(axis=1))


def adapter_columns(out, x, y, norms, magnitudes, bias, rows, columns):
    """out (rows, columns) = x * magnitudes / norms + bias; x + bias where norms are 0. With y: out
    = x * y * magnitudes / norms + bias; 0 + bias where norms are 0. None: magnitudes 1, no bias."""
    there = norms > 0
    factors = np.ones_like(norms) if magnitudes is None else magnitudes.copy()
    np.divide(factors, norms, out=factors, where=there)
    factors[~there] = 0 if y is not None else 1
    product = compute(x) * factors
    if y is not None:
        product = product * compute(y)
    out[...] = product if bias is None else product + compute(bias)


# -- Gradients of h and B, in two stages

# name: (rows, N, rank, start and stop of each adapter's columns)
BACKWARD_CASES = {
    "one": (40, 72, 8, 0, 72),
    "three": (300, 264, 16, 0, 128, 128, 200, 200, 264),
    "padded": (136, 96, 3, 0, 96),
    "four": (300, 264, 8, 0, 128, 128, 200, 200, 208, 208, 264),
    "two_of_three": (270, 160, 20, 0, 64, 96, 160),
    "two_groups_of_ranks": (260, 136, 40, 8, 136),
    "qwen7b_down": (4096, 3584, 16, 0, 3584),
    "qwen7b_qkv": (4096, 4608, 16, 0, 3584, 3584, 4096, 4096, 4608),
    "qwen7b_up": (4096, 37888, 16, 0, 18944, 18944, 37888),
    "qwen7b_head": (512, 152064, 16, 0, 152064),
    "qwen7b_up_rank64": (4096, 37888, 64, 0, 18944, 18944, 37888),
}


def adapter_backward_partials(
    h_partial, b_partial, d_out, h, b, rows, N, h_columns, split_columns, *spans, rank, block_rows
):
    """h_partial: products over split_columns columns of a span each; b_partial: products over
    block_rows rows each. spans: start and stop of four spans, unused spans are empty. Columns that
    pad the rank stay unchanged."""
    split = done = 0
    for number, (start, stop) in enumerate(zip(spans[::2], spans[1::2], strict=True)):
        if start == stop:
            continue
        x, own_h = compute(d_out[:, start:stop]), compute(h[:, number * rank : (number + 1) * rank])
        own_b = compute(b[done : done + stop - start])
        for first in range(0, stop - start, split_columns):
            part = slice(first, first + split_columns)
            np.matmul(x[:, part], own_b[part], out=h_partial[split, :, :rank])
            split += 1
        for group, to in enumerate(b_partial):
            part = slice(group * block_rows, (group + 1) * block_rows)
            np.matmul(x[part].T, own_h[part], out=to[done : done + stop - start, :rank])
        done += stop - start


def adapter_backward_finish(
    d_h, d_b, h_partial, b_partial, scalars, accumulate, salt, scale, rows, h_columns, b_rows,
    groups, *ends, rank,
):  # fmt: skip
    """d_h (rows, h_columns) = scale * sums of h_partial; d_b (b_rows, rank) = or += scale * sums of
    b_partial. ends: index in h_partial at which the splits of each span end."""
    d_h[:, len(set(ends)) * rank :] = 0
    for number, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        if first < end:
            total = h_partial[first:end, :, :rank].sum(axis=0)
            d_h[:, number * rank : (number + 1) * rank] = total * np.float32(scale)
    total = b_partial[:, :, :rank].sum(axis=0) * np.float32(scale)
    store_gradient(d_b, total, scalars, bool(accumulate), salt)
