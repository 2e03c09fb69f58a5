"""References of llmq/cu/attention/heads.cu: copies and sums of heads between different layouts."""

import numpy as np
from numpy.lib.stride_tricks import as_strided

from llmq.ref.common import compute

# name: (rows, heads, size, elements from a head to the next in the other tensor)
CASES = {"one": (1, 1, 8, 8), "ragged": (13, 3, 24, 40), "glm47_flash": (16384, 20, 192, 256)}


def _heads(x, rows, heads, size, first, row, head):
    """A view (rows, heads, size) of the flat x, from element `first` on. row, head: the strides, in
    elements."""
    flat = x.reshape(-1)[first:]
    return as_strided(flat, (rows, heads, size), [n * x.itemsize for n in (row, head, 1)])


def heads_copy(
    out, x, rows, heads, size, out_first, out_row, out_head, x_first, x_row, x_head
):  # fmt: skip
    """out[out_first + r out_row + h out_head + c] = x[x_first + r x_row + h x_head + c]."""
    of_x = _heads(x, rows, heads, size, x_first, x_row, x_head)
    _heads(out, rows, heads, size, out_first, out_row, out_head)[...] = of_x


def heads_sum(out, x, rows, heads, size, out_first, out_row, x_first, x_row, x_head):
    """out[out_first + r out_row + c] = the sum over h of x[x_first + r x_row + h x_head + c], in
    F32, one head after the other."""
    of_x = _heads(x, rows, heads, size, x_first, x_row, x_head)
    total = np.zeros((rows, size), np.float32)
    for head in range(heads):
        total += compute(of_x[:, head])
    _heads(out, rows, 1, size, out_first, out_row, 0)[:, 0] = total
