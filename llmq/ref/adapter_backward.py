"""References of cu/adapter_backward.cu: gradients of adapters' h and B, in two stages."""

import numpy as np

from llmq.ref.common import compute, store_gradient

# name: (rows, N, rank, starts and stops of the columns that have an adapter each)
CASES = {
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
    """Sums over split_columns columns of a span each, and over block_rows rows each.

    spans: start and stop of four; empty where there are fewer. Columns that pad ranks stay as they
    are.
    """
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
    """d_h (rows, h_columns) and d_b (b_rows, rank), or what is added to it: scale * the sums.

    ends: where in h_partial the splits of each span end.
    """
    d_h[:, len(set(ends)) * rank :] = 0
    for number, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        if first < end:
            total = h_partial[first:end, :, :rank].sum(axis=0)
            d_h[:, number * rank : (number + 1) * rank] = total * np.float32(scale)
    total = b_partial[:, :, :rank].sum(axis=0) * np.float32(scale)
    store_gradient(d_b, total, scalars, bool(accumulate), salt)
