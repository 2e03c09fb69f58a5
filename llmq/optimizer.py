"""AdamW on slabs: global norm, clip, update."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.dtypes import I64, DType
from llmq.grads import Gradients
from llmq.ops import adamw, global_norm
from llmq.params import Slab
from llmq.runtime.device import Device
from llmq.runtime.tensor import Tensor
from llmq.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConstants:
    """What is baked into captured launches; the learning rate and the rest are in StepScalars."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


class AdamW:
    """First and second moments of every slab, zero at start."""

    def __init__(
        self,
        dev: Device,
        table: tuple[Slab, ...],
        constants: AdamWConstants,
        m_dtype: DType,
        v_dtype: DType,
    ):
        self.dev = dev
        self.table = table
        self.constants = constants
        self.m: dict[str, Tensor] = {}
        self.v: dict[str, Tensor] = {}
        self.segments: dict[str, Tensor] = {}
        for slab in table:
            name, shape = slab.name, (slab.size,)
            self.m[name] = dev.alloc(f"{name}.m", shape, m_dtype, "Adam M")
            self.v[name] = dev.alloc(f"{name}.v", shape, v_dtype, "Adam V")
            segments = slab.segments()
            self.segments[name] = dev.alloc(f"{name}.segments", segments.shape, I64, "Activations")
            dev.zero(self.m[name])
            dev.zero(self.v[name])
            dev.upload(self.segments[name], segments)

    def update(self, weights: Weights, grads: Gradients, stats: Tensor, scalars: Tensor) -> None:
        """Norm of all gradients, clip factor, then every slab's update. Only launches."""
        global_norm.squared(self.dev, stats, [grads.slabs[s.name] for s in self.table])
        global_norm.finish(self.dev, stats, scalars)
        for slab in self.table:
            name = slab.name
            work, master = weights.work[name], weights.master[name]
            adamw.update(
                self.dev,
                master,
                None if work is master else work,
                grads.slabs[name],
                self.m[name],
                self.v[name],
                self.segments[name],
                scalars,
                beta1=self.constants.beta1,
                beta2=self.constants.beta2,
                epsilon=self.constants.epsilon,
                weight_decay=self.constants.weight_decay,
                salt=slab.params[0].index,
            )
