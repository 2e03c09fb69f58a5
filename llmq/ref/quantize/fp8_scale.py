"""References of cu/quantize/fp8_scale.cu: scales from the largest |x| of the last optimizer
steps."""

import numpy as np

from llmq.base.dtypes import STAT
from llmq.ref.common import row_blocks, update_abs_max

# steps in the history, tensors
CASES = {"one": (1, 1), "short": (2, 300), "qwen05b": (16, 193), "qwen7b": (16, 225)}

LEAST_ABS_MAX = np.float32(1e-10)  # equal to llmq/ref/quantize/quantize.py's


def fp8_scale_update(scales, factors, history, abs_maxes, limits, length, n):
    """Append the newest largest |x| to the history; scale = largest of the history / limit; factor
    = 1 / scale."""
    if abs_maxes is not None:
        history[:-1] = history[1:].copy()
        newest = abs_maxes[:, 0]
        history[-1] = np.where(np.isfinite(newest), newest, np.float32(0))
    largest = history.max(axis=0)
    scale = np.maximum(largest, LEAST_ABS_MAX) / limits
    scales[:, 0] = np.where(largest > 0, scale, np.float32(1))
    if factors is not None:
        factors[:, 0] = np.float32(1) / scales[:, 0]


def fp8_scale_now(scale, abs_max, limit):
    """Set scale as `quantize` does. limit: the largest finite value of the codes' dtype."""
    finite = np.isfinite(abs_max[0])
    scale[0] = max(abs_max[0], LEAST_ABS_MAX) / np.float32(limit) if finite else np.nan


def fp8_scale_count(stats, saturated, abs_maxes, n):
    """stats[saturated] += sum of the unsigned counts; stats[norm_squared] becomes NaN if any of
    abs_maxes is not finite."""
    stats[STAT["saturated"]] += saturated[:, 0].view(np.uint32).sum(dtype=np.uint64)
    if not np.isfinite(abs_maxes[:, 0]).all():
        stats[STAT["norm_squared"]] = np.nan


# -- Largest |x| of a tensor

ABS_MAX_CASES = {
    "one": (1,),
    "ragged": (3, 67),
    "loop": (140003,),
    "qwen05b": (32 * 1024, 896),
    "qwen05b_weight": (9728, 896),
    "qwen15b": (32 * 1024, 1536),
}


def abs_max(abs_max, x, n):
    """abs_max[0] = max(abs_max[0], largest |x|); NaN counts as the largest."""
    x = x.reshape(-1)
    for block in row_blocks(n, 1):
        update_abs_max(abs_max, x[block])


def abs_max_combine(out, gathered, world_size, n):
    """out = the maxima over ranks; NaN counts as the largest."""
    np.maximum.reduce(gathered.reshape(world_size, n), axis=0, out=out)


def abs_max_scales(scales, abs_maxes, largest, n):
    """Set the scales of many tensors, as `quantize` does."""
    np.maximum(abs_maxes, np.float32(1e-10), out=scales)
    scales /= np.float32(largest)
    scales[~np.isfinite(abs_maxes)] = np.nan
