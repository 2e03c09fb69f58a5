"""References of cu/fp8_scale.cu: scales from the largest values of the last optimizer steps."""

import numpy as np

from llmq.base.dtypes import STAT

# steps in the history, tensors
CASES = {"one": (1, 1), "short": (2, 300), "qwen05b": (16, 193), "qwen7b": (16, 225)}

LEAST_ABS_MAX = np.float32(1e-10)  # as in llmq/ref/quantize.py


def fp8_scale_update(scales, factors, history, abs_maxes, limits, length, n):
    """The newest step goes to the end of the history; scale = largest of the history / limit.

    factor = 1 / scale.
    """
    if abs_maxes is not None:
        history[:-1] = history[1:].copy()
        newest = abs_maxes[:, 0]
        history[-1] = np.where(np.isfinite(newest), newest, np.float32(0))
    largest = history.max(axis=0)
    scale = np.maximum(largest, LEAST_ABS_MAX) / limits
    scales[:, 0] = np.where(largest > 0, scale, np.float32(1))
    if factors is not None:
        factors[:, 0] = np.float32(1) / scales[:, 0]


def fp8_scale_count(stats, saturated, abs_maxes, n):
    """stats[saturated] += sum of the counts, which have no sign; the norm NaN for an infinity."""
    stats[STAT["saturated"]] += saturated[:, 0].view(np.uint32).sum(dtype=np.uint64)
    if not np.isfinite(abs_maxes[:, 0]).all():
        stats[STAT["norm_squared"]] = np.nan
