"""References of cu/experts/expert_rows.cu: sort rows by expert, and combine experts' results."""

import numpy as np

from llmq.ref.common import compute, row_blocks, store_gradient

# rows, features, experts, experts per row
CASES = {
    "one": (1, 8, 4, 1),
    "small": (50, 40, 32, 4),
    "several_blocks": (1100, 16, 60, 4),
    "wide": (33, 776, 512, 10),
    "qwen30b": (16384, 2048, 128, 8),
}


def rows_count(counts, chosen, n, E, chunk):
    """counts (blocks, E): the number of choices of each expert in each block of `chunk` choices."""
    flat = chosen.reshape(-1)
    for b, row in enumerate(counts):
        row[...] = np.bincount(flat[b * chunk : (b + 1) * chunk], minlength=E)


def rows_scan(starts, counts, blocks, E):
    """starts (E + 1): first place of each expert; counts: first place of each block and expert."""
    starts[0] = 0
    np.cumsum(counts.sum(axis=0), out=starts[1:])
    before = np.cumsum(counts, axis=0) - counts
    counts[...] = starts[:E] + before


def rows_place(order, place, chosen, counts, n, E, chunk):
    """order: the choices, stably sorted by expert; place: the inverse of order."""
    order[...] = np.argsort(chosen.reshape(-1), kind="stable")
    place.reshape(-1)[order] = np.arange(n, dtype=np.int32)


def rows_gather(out, x, place, rows, C, top_k):
    for places in place.T:
        out[places] = x


def rows_combine(out, y, place, weights, addend, rows, C, top_k):
    for block in row_blocks(rows, C):
        total = None
        for k in range(top_k):
            part = compute(y[place[block, k]])
            if weights is not None:
                part = part * weights[block, k, None]
            total = part if total is None else total + part
        if addend is not None:
            total = total + compute(addend[block])
        out[block] = total


def rows_combine_backward(d_y, d_weights, weighted, y, place, weights, rows, C, top_k):
    for block in row_blocks(rows, C):
        for k in range(top_k):
            at, weight = place[block, k], weights[block, k, None]
            d, values = compute(d_y[at]), compute(y[at])
            d_weights[block, k] = np.add.reduce(d * values, axis=1)
            d_y[at] = d * weight
            if weighted is not None:
                weighted[at] = values * weight


def rows_sum(d_sum, x, weights, order, scalars, starts, C, E, accumulate, salt):
    """d_sum[e] (C,) = or += the weighted sum of expert e's rows."""
    if not accumulate:
        d_sum[...] = 0
    for e in np.flatnonzero(np.diff(starts)):
        rows = slice(starts[e], starts[e + 1])
        its = compute(x[rows])
        if weights is not None:
            its = its * weights.reshape(-1)[order[rows], None]
        total = np.add.reduce(its, axis=0)
        store_gradient(d_sum[e], total, scalars, bool(accumulate), salt, first=int(e) * C)
