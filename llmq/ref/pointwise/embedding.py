"""References of cu/pointwise/embedding.cu: table lookup, and its deterministic gradient."""

from itertools import pairwise

import numpy as np

from llmq.ref.common import (
    BF16,
    compute,
    gradient_bits,
    gradient_seed,
    round_stochastic,
    store_gradient,
)

# B, T, C, Vp
CASES = {
    "one_token": (1, 1, 8, 64),
    "small": (2, 50, 40, 64),
    "several_slices": (2, 96, 264, 320),
    "qwen05b": (32, 1024, 896, 151936),
    "qwen15b": (32, 1024, 1536, 151936),
}


def embedding_forward(out, tokens, weight, position_weight, n, seq_len, C, starts, scale=1.0):
    np.take(weight, tokens, axis=0, out=out, mode="clip")
    if scale != 1:
        wide = compute(out)
        np.multiply(wide, wide.dtype.type(scale), out=out, casting="same_kind")
    if position_weight is not None:
        positions = np.arange(seq_len)
        if starts is not None:
            positions = positions - starts
        rows = compute(position_weight[positions])
        np.add(compute(out), rows, out=out, casting="same_kind")


def embedding_sort(order, spare, tokens, n, vocab, buckets):
    """order: the token indices by (id % buckets, id // buckets), equal ids in ascending order."""
    ids = tokens.reshape(-1)
    order[...] = np.argsort(
        (ids % buckets) * (vocab // buckets + 1) + ids // buckets, kind="stable"
    )


def embedding_backward(
    d_weight, partial, d_out, tokens, order, scalars, n, C, scale, padding, first_id, rows, salt
):
    """Add scale times the sum of every run of equal ids to d_weight, except for `padding` and ids
    without a row in d_weight; embedding_finish has nothing to do."""
    ids = tokens.reshape(-1)[order]
    order = order[(ids != padding) & (ids >= first_id) & (ids < first_id + rows)]
    if not len(order):
        return
    ids = tokens.reshape(-1)[order] - first_id
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    sums = np.add.reduceat(compute(d_out.reshape(n, C))[order], starts, axis=0)
    sums *= sums.dtype.type(scale)
    ids = ids[starts]
    if d_weight.dtype == BF16:
        seed = gradient_seed(scalars, salt)
        sums += d_weight[ids].astype(np.float32)
        first = ids.astype(np.uint64) * np.uint64(C)
        d_weight[ids] = round_stochastic(sums, gradient_bits(seed, first, C))
    else:
        d_weight[ids] += sums


def embedding_finish(
    d_weight, partial, tokens, order, scalars, n, C, scale, padding, first_id, rows, salt
):
    """Add the runs that embedding_backward leaves in pieces; its reference leaves none."""


def embedding_backward_positions(
    d_position, d_out, scalars, positions, batch, seq_len, C, accumulate, salt
):
    total = np.add.reduce(compute(d_out), axis=0)
    store_gradient(d_position[:seq_len], total, scalars, bool(accumulate), salt)
    if not accumulate:
        d_position[seq_len:] = 0


def embedding_backward_documents(
    d_position, d_out, starts, scalars, positions, batch, seq_len, C, accumulate, salt
):
    x = compute(d_out)
    total = np.zeros((seq_len, C), x.dtype)
    for row, gradients in zip(starts, x, strict=True):
        edges = [0, *(np.flatnonzero(np.diff(row)) + 1), seq_len]
        for first, end in pairwise(edges):
            total[: end - first] += gradients[first:end]
    store_gradient(d_position[:seq_len], total, scalars, bool(accumulate), salt)
    if not accumulate:
        d_position[seq_len:] = 0
