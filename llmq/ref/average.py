"""Reference of the moving average of weights, and of its exchange with them."""

import numpy as np

from llmq.ref.common import step_scalars

CASES = {"one": (128,), "ragged_grid": (1152,), "qwen05b": (14912384,)}

LOW = np.uint32(0xFFFF)
HALF = np.uint32(0x8000)


def average_update(average, param, scalars, decay, n):
    """The average, nearer to param."""
    s, one = step_scalars(scalars), np.float32(1)
    if s["skip_update"]:
        return
    step = np.float32(s["step"])
    weight = one - min(np.float32(decay), (one + step) / (np.float32(10) + step))
    average += (param.astype(np.float32) - average) * weight


def average_exchange(average, param, back, n):
    """param, and what gives both back; see llmq/cu/average.cu."""
    if param.dtype == np.float32:
        average[...], param[...] = param.copy(), average.copy()
        return
    bits, shown = average.view(np.uint32), param.view(np.uint16)
    low, before = bits & LOW, shown.astype(np.uint32)
    up = (low > HALF).astype(np.uint32)
    if back:
        shown[...] = bits >> 16
        bits[...] = (before - up) << 16 | low
    else:
        shown[...] = (bits >> 16) + up
        bits[...] = before << 16 | low
