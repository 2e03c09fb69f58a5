"""References of cu/bias.cu: column sums in two stages."""

import numpy as np

from llmq.ref.common import compute, store_gradient

# rows, N
CASES = {
    "one_vector": (1, 8),
    "ragged": (77, 200),
    "several_splits": (700, 136),
    "qwen05b_qkv": (32 * 1024, 1152),
    "qwen15b_qkv": (32 * 1024, 2048),
}


def bias_backward(partial, d_out, rows, N, splits):
    d_out = d_out.reshape(rows, N)
    step = -(-rows // splits)
    for split in range(splits):
        block = compute(d_out[split * step : (split + 1) * step])
        np.add.reduce(block, axis=0, out=partial[split])


def column_sum(d, partial, scalars, rows, columns, accumulate, salt):
    """d (columns,) = or += the sum of partial (rows, columns) over its rows."""
    store_gradient(d, partial.sum(axis=0), scalars, bool(accumulate), salt)
