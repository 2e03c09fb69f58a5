"""Scales of fp8 codes of activations and gradients; `state/codes.py` makes the scales of weights.

Each tensor has one memory slot for its largest |x|, and one slot for its scale.

just in time   A tensor's scale follows from its own largest |x|. Each micro-step writes the slots
               anew.
delayed        A scale follows from the largest |x| of the last optimizer steps, and stays the same
               for a whole step. Kernels can then write codes directly, and count the elements that
               exceed the range. Products can write codes, too: see `DelayedScales.product`.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from llmq.base.dtypes import F32, I32
from llmq.base.operand import FirstScale, Fp8Out, ProductCodes
from llmq.base.tensor import Tensor
from llmq.ops.quantize import fp8_scale
from llmq.ops.quantize.fp8_scale import STRIDE, slots
from llmq.runtime.device import Device

HISTORY = 16  # number of optimizer steps whose largest |x| is remembered
# Factor by which a tensor may outgrow its largest |x| in the history before elements saturate. E4M3
# spans 18 powers of two, so a margin of two costs one power at the lower end and no precision
# elsewhere. Without this margin about one tensor in 17 would saturate in every step.
SCALE_MARGIN = 2.0
STATE = "fp8_abs_max."  # prefix of the histories' names in a checkpoint


class StaticScales:
    """Scales that no step changes; the base class of other scales."""

    ready = True
    """True if all scales that kernels read exist; False before the first delayed scales are
    computed."""

    def start_step(self) -> None:
        """Prepare the scales for the micro-steps of an optimizer step."""

    def start_micro_step(self, *, of_step: bool) -> None:
        """Prepare the scales for a forward pass. of_step: False if the forward pass belongs to an
        evaluation."""

    def calibrate(self) -> None:
        """Compute the first scales from a micro-step that ran without scales, and clear the
        recorded
        x
        ."""

    def finish_step(self, stats: Tensor) -> None:
        """Compute the next step's scales, before the update. stats: F64 (10,), this rank's
        statistics. The method only launches kernels."""

    def state(self) -> dict[str, list[float]]:
        """Return the histories to be saved in a checkpoint, by tensor; equal on all ranks."""
        return {}

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        """Restore the histories that `state` returned."""


class Scales(StaticScales):
    """Just-in-time scales: each tensor name has a slot, which every micro-step fills anew."""

    def __init__(self, dev: Device, limits: Mapping[str, float]):
        """limits: the largest finite value of the codes' dtype, by tensor name."""
        self.dev, self.names = dev, tuple(limits)
        self.abs_maxes = self._alloc("abs_maxes", len(limits), STRIDE)
        self.scales = self._alloc("scales", len(limits), STRIDE)
        self._abs_max_of, self._scale_of = slots(self.abs_maxes, limits), slots(self.scales, limits)
        # Kernels that recompute tensors count saturated elements in this tensor, which nobody
        # reads.
        self._ignored = dev.alloc("fp8_saturated.again", (1,), I32, "Activations")
        dev.zero(self._ignored)

    def _alloc(self, name: str, *shape: int) -> Tensor:
        return self.dev.alloc(name, shape, F32, "Activations")

    def abs_max(self, name: str) -> Tensor:
        """Return the slot, F32 (1,), in which a tensor's kernel records the largest |x|."""
        return self._abs_max_of[name]

    def scale(self, name: str) -> Tensor:
        """Return the scale of a tensor, F32 (1,): x ~ code * scale."""
        return self._scale_of[name]

    def fp8_out_again(self, name: str, codes: Tensor | None, transposed: Tensor | None) -> Fp8Out:
        """Return the buffers of a kernel that recomputes a tensor as codes. The kernel uses the
        scale of forward, which has counted the saturated elements."""
        return Fp8Out(codes, transposed, self.scale(name), self._ignored)

    def forget(self) -> None:
        self.dev.zero(self.abs_maxes)

    def start_step(self) -> None:
        self.forget()

    def start_micro_step(self, *, of_step: bool) -> None:
        self.forget()


class DelayedScales(Scales):
    """Delayed scales: each tensor name has a slot and a history of the largest |x|."""

    def __init__(self, dev: Device, limits: Mapping[str, float], products: Sequence[str] = ()):
        """products: the names of tensors whose codes products write."""
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
        """Allocate a slot for each tensor whose codes are written by a product. values: the largest
        finite values of codes, as `_limits` returns the values."""
        n = len(limits)
        self._factors = self._alloc("fp8_factors", n, STRIDE)
        self.dev.upload(self._factors, np.ones((n, STRIDE), np.float32))
        self._factor_of = slots(self._factors, limits)
        self._largest = self._alloc("abs_maxes.products", len(products), STRIDE)
        self._largest_of = slots(self._largest, products)
        limit_slots = self._alloc("fp8_limits.own", n, STRIDE)  # kernels take limits by address
        self.dev.upload(limit_slots, np.repeat(values[:, None], STRIDE, axis=1))
        self._limit_of = slots(limit_slots, limits)
        self._newest = self._alloc("abs_max.newest", 1, 1)

    def fp8_out(self, name: str, codes: Tensor | None, transposed: Tensor | None) -> Fp8Out:
        """Return the buffers of a kernel that writes a tensor's codes with the known scale."""
        return Fp8Out(codes, transposed, self.scale(name), self._saturated_of[name])

    def product(self, name: str, codes: Tensor | None, *, again: bool = False) -> ProductCodes:
        """Return the buffers of a product that writes a tensor's codes. codes: the memory of the
        codes; None if the memory is not allocated yet. again: True if the tensor's statistics have
        been recorded already. If again is False, the kernel that reads the codes records the
        statistics."""
        scale, factor, largest = self.scale(name), self._factor_of[name], self._largest_of[name]
        if again:
            return ProductCodes(codes, scale, factor, largest)
        abs_max, saturated = self.abs_max(name), self._saturated_of[name]
        first = self.first_of(name)
        return ProductCodes(codes, scale, factor, largest, abs_max, saturated, first)

    def first_of(self, name: str) -> FirstScale | None:
        """Return the buffers from which a tensor's first delayed scale is computed; None once
        tensors have a history."""
        if self.ready:
            return None
        row = list(self._scale_of).index(name)
        scale, factor, largest = (
            table.rows(row, row + 1) for table in (self.scales, self._factors, self.abs_maxes)
        )
        if name in self._largest_of:  # the kernel that reads the codes has not raised abs_max yet
            row = list(self._largest_of).index(name)
            largest = self._largest.rows(row, row + 1)
        return FirstScale(scale, self._newest, self._limit_of[name], largest, factor)

    def forget(self) -> None:
        super().forget()
        self.dev.zero(self._saturated)

    def start_micro_step(self, *, of_step: bool) -> None:
        if not (of_step and self.ready):  # delayed scales need a step's maximum
            self.forget()

    def finish_step(self, stats: Tensor) -> None:
        """Compute the next step's scales, and add this rank's count of saturated elements to stats.
        The gradient norm in stats becomes NaN if a tensor had an infinity, because kernels clamp
        infinities like large numbers."""
        fp8_scale.count(self.dev, stats, self._saturated, self.abs_maxes)
        self._record()

    def calibrate(self) -> None:
        self._record()
        self.ready = True
        self.forget()

    def _record(self) -> None:
        """Add the largest |x| over all ranks to the history, and compute scales from the
        history."""
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
        """Return each tensor's history of largest |x|, oldest step first."""
        if not self.ready:
            return {}
        history = self.dev.download(self._history).T.tolist()
        return {f"{STATE}{name}": row for name, row in zip(self._scale_of, history, strict=True)}

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        """Restore the histories of largest |x|. If one of this run's tensors has no history, all
        histories begin anew."""
        columns = [state.get(f"{STATE}{name}", []) for name in self._scale_of]
        self.ready = all(len(column) == HISTORY for column in columns)
        if self.ready:
            self.dev.upload(self._history, np.array(columns, np.float32).T)
            self._update(None)
        else:
            self.dev.zero(self._history)
