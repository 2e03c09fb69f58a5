"""References of cu/outliers.cu: columns that signed bytes are too coarse for."""

import numpy as np

from llmq.ref.common import compute

# rows, columns, rows of the weight
CASES = {
    "smallest": (16, 16, 16),
    "ragged": (48, 208, 80),
    "wide": (16, 4112, 32),
    "qwen7b_up": (4096, 3584, 37888),
    "qwen7b_down": (4096, 18944, 3584),
}


def outliers_select(mask, index, column_max, threshold, most, cols):
    """index (most,): the columns whose largest |x| is above a limit, in order, then -1; mask: 0 of
    these columns, 1 of the others.

    limit: the threshold, or if more columns are above it, the least with which most are enough.
    NaN is above everything.
    """
    bits = np.abs(column_max).view(np.uint32)
    limit = np.float32(threshold).reshape(1).view(np.uint32)[0]
    ordered = np.sort(bits)[::-1]
    if cols > most:
        limit = max(limit, ordered[most])
    chosen = np.flatnonzero(bits > limit)
    index[...] = -1
    index[: len(chosen)] = chosen
    mask[...] = 1
    mask[chosen] = 0


def outliers_take(out, x, index, rows, cols, most):
    """out (rows, most) = the columns of x that index names, 0 where it names none."""
    out[...] = 0
    chosen = index[index >= 0]
    out[:, : len(chosen)] = x[:, chosen]


def outliers_weight(out, q, scale, index, rows, cols, most):
    """Do as outliers_take, with a weight's codes times the scale of their row."""
    out[...] = 0
    chosen = index[index >= 0]
    out[:, : len(chosen)] = compute(q[:, chosen]) * scale[:, None]
