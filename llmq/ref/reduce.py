"""Reference of adding to a gradient."""

import numpy as np

from llmq.ref.common import (
    BF16,
    compute,
    gradient_bits,
    gradient_seed,
    round_stochastic,
    row_blocks,
)

CASES = {"one": (1,), "ragged": (1003,), "several_blocks": (70, 129), "qwen05b": (14912384,)}


def reduce_sum(d_sum, *args):
    """args: eight parts, None after the last; scalars, accumulate, salt, first, n. See the op."""
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
