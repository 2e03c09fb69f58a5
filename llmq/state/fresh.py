"""The first values of parameters."""

from __future__ import annotations

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.tensor import Tensor
from llmq.ops import fill, random
from llmq.runtime.device import Device
from llmq.state.params import Param


def begin(
    dev: Device, param: Param, target: Tensor, first: int, config: ModelConfig, seed: int
) -> None:
    """Fresh values of a parameter from element `first` on, in `target`, which is zero."""
    if param.init == "one":
        fill.constant(dev, target, 1.0)
    elif param.init == "log_uniform":  # of vectors, which are small
        rng = np.random.default_rng((seed & 0xFFFFFFFF, param.index))
        values = np.log(rng.uniform(0.01, 16, param.size))[first : first + target.size]
        dev.upload(target, values.astype(target.dtype.numpy))
    elif param.init != "zero":
        std = config.initializer_range
        if param.init == "residual":
            std /= np.sqrt(2.0 * config.num_layers)
        elif param.init == "unit":
            std = 1.0
        elif param.init == "adapter":  # as wide as PEFT's, which are uniform
            std = 1.0 / np.sqrt(3.0 * param.columns)
        param_seed = (param.index << 32) | (seed & 0xFFFFFFFF)
        random.normal(dev, target, float(std), param_seed, first)
    for start, stop in param.gaps:
        own = [min(max(row * param.columns - first, 0), target.size) for row in (start, stop)]
        if own[0] < own[1]:
            dev.zero(target.rows(*own))
