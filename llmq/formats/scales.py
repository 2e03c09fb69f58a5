"""Scales of activations and of their gradients in fp8; those of weights are in `state/codes.py`.

There is a slot for each tensor, with its largest absolute value and its scale.

just in time   A tensor's scale follows from its own largest value. Slots are filled anew in every
               micro-step and kept until its end.
delayed        A scale follows from the largest values of the last optimizer steps and is the same
               for a whole step. The kernels that make the tensors can write codes directly, and
               count the elements that were too large for them. Products can, too; see `product`.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from llmq.base.dtypes import F32, I32
from llmq.base.operand import FirstScale, Fp8Out, ProductCodes
from llmq.base.tensor import Tensor
from llmq.ops.quantize import fp8_scale
from llmq.ops.quantize.fp8_scale import STRIDE, slots
from llmq.runtime.device import Device

HISTORY = 16  # optimizer steps
# How far a tensor may grow beyond its largest value of these steps before elements saturate. A
# factor of two costs one of the 18 powers of two that E4M3 spans and no precision in the others;
# without it about one tensor in 17 would saturate in every step.
SCALE_MARGIN = 2.0
STATE = "fp8_abs_max."  # prefix of the names in a checkpoint


class NoScales:
    """The work over the steps: nothing where there are no scales."""

    ready = True
    """Whether there are the scales that are needed: False for delayed ones before the first."""

    def start_step(self) -> None:
        """Before the micro-steps of an optimizer step."""

    def start_micro_step(self, *, of_step: bool) -> None:
        """Before a forward pass; of_step: of an optimizer step, else of an evaluation."""

    def calibrate(self) -> None:
        """After a micro-step that was not ready: now scales are; begin anew."""

    def finish_step(self, stats: Tensor) -> None:
        """Before the update of an optimizer step; stats: F64 (10,), sums of this rank. Launches."""

    def state(self) -> dict[str, list[float]]:
        """The part of a checkpoint that holds the scales, by tensor; the same on all ranks."""
        return {}

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        """Take what `state` gave."""


class Scales(NoScales):
    """A slot for each name, for scales just in time: they follow from each micro-step anew."""

    def __init__(self, dev: Device, limits: Mapping[str, float]):
        """limits: by name, the largest finite value of its format. names: those, in order."""
        self.dev, self.names = dev, tuple(limits)
        self.abs_maxes = self._alloc("abs_maxes", len(limits), STRIDE)
        self.scales = self._alloc("scales", len(limits), STRIDE)
        self._abs_max_of, self._scale_of = slots(self.abs_maxes, limits), slots(self.scales, limits)
        # Nobody reads the count of tensors that are made again.
        self._ignored = dev.alloc("fp8_saturated.again", (1,), I32, "Activations")
        dev.zero(self._ignored)

    def _alloc(self, name: str, *shape: int) -> Tensor:
        return self.dev.alloc(name, shape, F32, "Activations")

    def abs_max(self, name: str) -> Tensor:
        """Where the kernel that makes a tensor records its largest absolute value, F32 (1,)."""
        return self._abs_max_of[name]

    def scale(self, name: str) -> Tensor:
        """F32 (1,): x ~ code * scale."""
        return self._scale_of[name]

    def fp8_out_again(self, name: str, codes: Tensor | None, transposed: Tensor | None) -> Fp8Out:
        """The place where a kernel writes the codes of a tensor that it makes again. The scale is
        that of the first time, when what saturates was counted."""
        return Fp8Out(codes, transposed, self.scale(name), self._ignored)

    def forget(self) -> None:
        self.dev.zero(self.abs_maxes)

    def start_step(self) -> None:
        self.forget()

    def start_micro_step(self, *, of_step: bool) -> None:
        self.forget()


class DelayedScales(Scales):
    """A slot for each name, with a history."""

    def __init__(self, dev: Device, limits: Mapping[str, float], products: Sequence[str] = ()):
        """products: those of the names whose codes products write."""
        super().__init__(dev, limits)
        n, world = len(limits), dev.mesh.size()
        self.ready, self.products = False, tuple(products)
        self._history = self._alloc("abs_max_history", HISTORY, n)
        self._limits = self._alloc("fp8_limits", n)
        self._saturated = dev.alloc("fp8_saturated", (n, STRIDE), I32, "Activations")
        self._saturated_of = slots(self._saturated, limits)
        self._gathered = self._alloc("abs_maxes.all", world * n * STRIDE) if world > 1 else None
        dev.zero(self._history)
        values = np.array(list(limits.values()), np.float32) / np.float32(SCALE_MARGIN)
        dev.upload(self._limits, values)
        self._factors = None
        if products:
            self._prepare_products(limits, values, products)

    def _prepare_products(
        self, limits: Mapping[str, float], values: np.ndarray, products: Sequence[str]
    ) -> None:
        """Allocate the slots that cannot be had with one kernel over all: values as in _limits."""
        n = len(limits)
        self._factors = self._alloc("fp8_factors", n, STRIDE)
        self.dev.upload(self._factors, np.ones((n, STRIDE), np.float32))
        self._factor_of = slots(self._factors, limits)
        self._largest = self._alloc("abs_maxes.products", len(products), STRIDE)
        self._largest_of = slots(self._largest, products)
        own = self._alloc("fp8_limits.own", n, STRIDE)  # each with an address that kernels take
        self.dev.upload(own, np.repeat(values[:, None], STRIDE, axis=1))
        self._limit_of = slots(own, limits)
        self._newest = self._alloc("abs_max.newest", 1, 1)

    def fp8_out(self, name: str, codes: Tensor | None, transposed: Tensor | None) -> Fp8Out:
        """The place where a kernel writes a tensor's codes when scales are known."""
        return Fp8Out(codes, transposed, self.scale(name), self._saturated_of[name])

    def product(self, name: str, codes: Tensor | None, *, again: bool = False) -> ProductCodes:
        """The codes (None: no memory yet) that a product writes of a tensor, and what their reader
        has to find out. again: they were read before, or are made again."""
        known = (self.scale(name), self._factor_of[name], self._largest_of[name])
        if again:
            return ProductCodes(codes, *known)
        found = (self.abs_max(name), self._saturated_of[name])
        return ProductCodes(codes, *known, *found, self.first_of(name))

    def first_of(self, name: str) -> FirstScale | None:
        """The buffers from which the first delayed scale of a tensor is computed; None once
        tensors have a history."""
        if self.ready:
            return None
        row = list(self._scale_of).index(name)
        scale, factor, largest = (
            table.rows(row, row + 1) for table in (self.scales, self._factors, self.abs_maxes)
        )
        if name in self._largest_of:  # nobody has read it yet
            row = list(self._largest_of).index(name)
            largest = self._largest.rows(row, row + 1)
        return FirstScale(scale, self._newest, self._limit_of[name], largest, factor)

    def forget(self) -> None:
        super().forget()
        self.dev.zero(self._saturated)

    def start_micro_step(self, *, of_step: bool) -> None:
        if not (of_step and self.ready):  # scales follow from all micro-steps of a step
            self.forget()

    def finish_step(self, stats: Tensor) -> None:
        """Scales for the next step. This rank's count of saturated elements is added to stats; the
        norm becomes NaN where a tensor had an infinity, which is clamped like any other large
        number."""
        fp8_scale.count(self.dev, stats, self._saturated, self.abs_maxes)
        self._record()

    def calibrate(self) -> None:
        self._record()
        self.ready = True
        self.forget()

    def _record(self) -> None:
        """Add the largest values over all ranks to the history; scales from it."""
        if self._gathered is not None:
            flat = self.abs_maxes.view(self.abs_maxes.size)
            self.dev.mesh.group().all_gather(self._gathered, flat)
            fp8_scale.combine(self.dev, flat, self._gathered)
        self._update(self.abs_maxes)

    def _update(self, abs_maxes: Tensor | None) -> None:
        fp8_scale.update(
            self.dev, self.scales, self._history, self._limits, abs_maxes, factors=self._factors
        )

    def state(self) -> dict[str, list[float]]:
        """The history, the oldest step first."""
        if not self.ready:
            return {}
        history = self.dev.download(self._history).T.tolist()
        return {f"{STATE}{name}": row for name, row in zip(self._scale_of, history, strict=True)}

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        """Continue with a history; one that is not of the same tensors is none at all."""
        columns = [state.get(f"{STATE}{name}", []) for name in self._scale_of]
        self.ready = all(len(column) == HISTORY for column in columns)
        if self.ready:
            self.dev.upload(self._history, np.array(columns, np.float32).T)
            self._update(None)
        else:
            self.dev.zero(self._history)
