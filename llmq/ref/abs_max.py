"""Reference of the largest magnitude of a tensor."""

import numpy as np

from llmq.ref.common import row_blocks, update_abs_max

CASES = {
    "one": (1,),
    "ragged": (3, 67),
    "loop": (140003,),
    "qwen05b": (32 * 1024, 896),
    "qwen05b_weight": (9728, 896),
    "qwen15b": (32 * 1024, 1536),
}


def abs_max(abs_max, x, n):
    """abs_max[0] = max(abs_max[0], largest |x|), NaN wins."""
    x = x.reshape(-1)
    for block in row_blocks(n, 1):
        update_abs_max(abs_max, x[block])


def abs_max_combine(out, gathered, world_size, n):
    """out = the maxima over the ranks, NaN wins."""
    np.maximum.reduce(gathered.reshape(world_size, n), axis=0, out=out)


def abs_max_scales(scales, abs_maxes, largest, n):
    """Derive scales as quantize does, for many tensors."""
    np.maximum(abs_maxes, np.float32(1e-10), out=scales)
    scales /= np.float32(largest)
    scales[~np.isfinite(abs_maxes)] = np.nan
