"""References of cu/pointwise/reduce.cu: sums of tensors into a gradient, and column sums."""

import numpy as np

from llmq.ref.common import (
    BF16,
    compute,
    gradient_bits,
    gradient_seed,
    round_stochastic,
    row_blocks,
    store_gradient,
)

CASES = {"one": (1,), "ragged": (1003,), "several_blocks": (70, 129), "qwen05b": (14912384,)}


def reduce_sum(d_sum, *args):
    """args: eight parts, None after the last; then scalars, accumulate, salt, first, n, as in
    llmq/ops/pointwise/reduce.py."""
    parts = [x.reshape(-1) for x in args[:8] if x is not None]
    scalars, accumulate, salt, first, n = args[8:]
    seed = gradient_seed(scalars, salt)
    flat = d_sum.reshape(-1)
    for block in row_blocks(n, 1):
        addends = [flat[block]] * bool(accumulate) + [x[block] for x in parts]
        total = compute(addends[0])
        for addend in addends[1:]:
            total = np.add(total, compute(addend), out=None if total is addends[0] else total)
        if flat.dtype == BF16 and len(addends) > 1:
            bits = gradient_bits(seed, first + block.start, total.size)
            total = round_stochastic(total, bits)
        flat[block] = total


# -- The gradient of a bias: column sums in two stages

# rows, N
BIAS_CASES = {
    "one_vector": (1, 8),
    "ragged": (77, 200),
    "one_column": (5, 1),
    "no_vectors": (131, 37),
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
