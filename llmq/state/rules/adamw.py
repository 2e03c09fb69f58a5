"""AdamW: keeps two moments for each element, and decays the weights of matrices only."""

import numpy as np

from llmq.base.tensor import Tensor
from llmq.ops.update import adamw
from llmq.runtime.device import Device
from llmq.state.rules.rule import OptimizerState, ShardSlice, UpdateRule


class AdamW(UpdateRule):
    """The update rule AdamW with first moment m and second moment v (llmq/ops/update/adamw.py)."""

    moments = (
        OptimizerState(
            name="m", group="adam.m", category="Adam M", dtype="opt_m_dtype",
            offload="offload_opt_m",
        ),
        OptimizerState(
            name="v", group="adam.v", category="Adam V", dtype="opt_v_dtype",
            offload="offload_opt_v",
        ),
    )  # fmt: skip

    def prepare(self, scalars: np.void, step: int) -> None:
        """Write the factors that correct the moments for their start at zero."""
        scalars["beta1_correction"] = 1.0 / (1.0 - self.options.beta_1**step)
        scalars["beta2_correction"] = 1.0 / (1.0 - self.options.beta_2**step)

    def update(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """Update the elements with one launch, at the learning rate of the slab."""
        options = self.options
        adamw.update(
            dev,
            part.master,
            part.work,
            part.grad,
            part.moments["m"],
            part.moments["v"],
            part.segments,
            scalars,
            beta1=options.beta_1,
            beta2=options.beta_2,
            epsilon=options.adam_epsilon,
            weight_decay=options.weight_decay,
            salt=part.slab.params[0].index,
            lr_scale=options.rate_factor(part.slab.name),
            first=part.first,
            m_scale=part.scales.get("m"),
            v_scale=part.scales.get("v"),
        )
