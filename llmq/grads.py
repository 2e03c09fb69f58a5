"""Gradients: one slab per weight slab, accumulated over the micro-steps of an optimizer step.

They hold the gradient of the SUM of token losses; global_norm divides once, by the number of
target tokens of the whole step.
"""

from __future__ import annotations

from llmq.dtypes import DType
from llmq.params import Slab
from llmq.runtime.device import Device
from llmq.runtime.tensor import Accumulator, Tensor


class Gradients:
    """start_micro_step -> full(name) … notify(name) -> end_micro_step, for every micro-step."""

    def __init__(self, dev: Device, table: tuple[Slab, ...], dtype: DType, scalars: Tensor):
        self.table = {slab.name: slab for slab in table}
        self.scalars = scalars
        self.slabs = {
            slab.name: dev.alloc(f"{slab.name}.grad", (slab.size,), dtype, "Gradients")
            for slab in table
        }
        for slab in self.slabs.values():
            dev.zero(slab)  # the gaps between parameters count in the norm: they must stay zero
        self._accumulate: bool | None = None

    def start_micro_step(self, accumulate: bool) -> None:
        """accumulate False (the first of a step): gradients are overwritten, not added to."""
        if self._accumulate is not None:
            raise AssertionError("grads: start_micro_step inside a micro-step")
        self._accumulate = accumulate

    def full(self, name: str) -> dict[str, Accumulator]:
        """Where the gradients of a slab's parameters go in this micro-step, by key."""
        if self._accumulate is None:
            raise AssertionError(f"grads: full({name!r}) outside of a micro-step")
        slab = self.table[name]
        views = slab.views(self.slabs[name])
        return {
            p.key: Accumulator(views[p.key], self._accumulate, self.scalars, p.index)
            for p in slab.params
        }

    def notify(self, name: str) -> None:
        """Say that the slab's gradients of this micro-step are enqueued; reduction may start."""
        if self._accumulate is None:
            raise AssertionError(f"grads: notify({name!r}) outside of a micro-step")

    def end_micro_step(self) -> None:
        """Close the micro-step."""
        if self._accumulate is None:
            raise AssertionError("grads: end_micro_step without start_micro_step")
        self._accumulate = None
