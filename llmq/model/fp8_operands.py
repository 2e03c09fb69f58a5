"""Operands in fp8: the two ways in which a tensor gets its scale and its codes.

Codes lie in two layouts, (rows, features) for products and (features, rows) for weights' gradients
(`linear.py` says why). What is made again in backward has a scale from forward, so that the kernel
which makes it writes its codes and no tensor, in both ways.

Scratch is a stack: codes of a tensor that is gone before them are taken before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from llmq.base.dtypes import E4M3, E4M3_MAX, E5M2, E5M2_MAX, DType
from llmq.base.operand import Fp8, Operand, Target
from llmq.base.tensor import Tensor
from llmq.model.activations import Activation, slot
from llmq.model.operands import GRADIENTS, HEAD, NAMES, Fp8Options, Operands, Plain, Write
from llmq.model.scales import DelayedScales, Scales
from llmq.ops import abs_max, quantize
from llmq.runtime.device import Device

MAX = {E4M3: E4M3_MAX, E5M2: E5M2_MAX}


def make_operands(
    dev: Device, fp8: Fp8Options | None, num_layers: int, rows: int, channels: int, dtype: DType
) -> Operands:
    """Of a model whose activations are (rows, channels) at the ends of its blocks."""
    if fp8 is None:
        return Plain(dev, rows, dtype)
    limits = {
        slot(layer, name): MAX[_format(fp8, name)] for layer in range(num_layers) for name in NAMES
    }
    if fp8.head:
        limits[HEAD] = MAX[fp8.value]
    if fp8.delayed:
        return Delayed(dev, fp8, DelayedScales(dev, limits), rows, channels, dtype)
    return JustInTime(dev, fp8, Scales(dev, limits), rows, dtype)


def _format(fp8: Fp8Options, name: str) -> DType:
    return fp8.gradient if name in GRADIENTS else fp8.value


class JustInTime(Operands):
    """The kernel writes a tensor and records its largest value; its scale and codes follow."""

    def __init__(self, dev: Device, fp8: Fp8Options, scales: Scales, rows: int, dtype: DType):
        super().__init__(dev, rows, dtype, fp8)
        self.scales = scales

    def _codes(
        self,
        temps: ExitStack,
        slot: str,
        shape: tuple[int, int],
        *,
        product: bool = True,
        transposed: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Scratch for codes (rows, features) and (features, rows), as far as they are needed."""
        name = slot.rpartition(".")[2]
        dtype, q, q_t = _format(self.fp8, name), None, None
        if product:
            q = temps.enter_context(self.dev.scratch(f"{name}.q", shape, dtype))
        if transposed:
            q_t = temps.enter_context(self.dev.scratch(f"{name}.q_t", shape[::-1], dtype))
        return q, q_t

    def _fp8(self, slot: str, source: Tensor | None, q: Tensor | None, q_t: Tensor | None) -> Fp8:
        return Fp8(source=source, codes=q, transposed=q_t, scale=self.scales.scale(slot))

    def _quantize(self, slot: str, q: Tensor | None, q_t: Tensor | None, x: Tensor) -> None:
        largest, scale = self.scales.abs_max(slot), self.scales.scale(slot)
        quantize.quantize(self.dev, q, q_t, scale, x, largest)

    # -- inputs ----------------------------------------------------------------------------------

    def input(self, temps: ExitStack, x: Activation, write: Write) -> Operand:
        q, _ = self._codes(temps, x.slot, x.shape, transposed=False)
        with self.dev.scratch(x.name, x.shape, x.dtype) as source:
            write(self.measured(x.slot, source))
            self._quantize(x.slot, q, x.codes, source)
        return self._fp8(x.slot, None, q, x.codes)

    def kept(self, x: Activation) -> Operand | None:
        return None if x.codes is None else self._fp8(x.slot, None, None, x.codes)

    def input_again(
        self, temps: ExitStack, x: Activation, write: Write, *, product: bool, out: Tensor | None
    ) -> Operand:
        q, q_t = self._codes(temps, x.slot, x.shape, product=product)
        write(Target(None, None, self.scales.fp8_out_again(x.slot, q, q_t)))
        return self._fp8(x.slot, None, q, q_t)

    # -- tensors that are there already ----------------------------------------------------------

    def of_tensor(
        self, temps: ExitStack, slot: str, x: Tensor, *, measured: bool, transposed: bool
    ) -> Operand:
        q, q_t = self._codes(temps, slot, x.shape, transposed=transposed)
        if not measured:
            abs_max.abs_max(self.dev, self.scales.abs_max(slot), x)
        self._quantize(slot, q, q_t, x)
        return self._fp8(slot, x, q, q_t)

    def of_tensor_again(self, temps: ExitStack, slot: str, x: Tensor, *, product: bool) -> Operand:
        q, q_t = self._codes(temps, slot, x.shape, product=product)
        quantize.scaled(self.dev, x, self.scales.fp8_out_again(slot, q, q_t))
        return self._fp8(slot, x, q, q_t)

    def measured(self, slot: str, out: Tensor) -> Target:
        return Target(out, self.scales.abs_max(slot))

    # -- gradients -------------------------------------------------------------------------------

    def gradient(
        self, temps: ExitStack, slot: str, write: Write, *, out: Tensor, bias: bool
    ) -> Operand:
        write(self.measured(slot, out))
        q, q_t = self._codes(temps, slot, out.shape)
        self._quantize(slot, q, q_t, out)
        return self._fp8(slot, out, q, q_t)

    # -- scales over the steps -------------------------------------------------------------------

    def start_step(self) -> None:
        self.scales.forget()

    def start_micro_step(self, *, of_step: bool) -> None:
        self.scales.forget()

    def largest(self) -> np.ndarray:
        values = self.dev.download(self.scales.abs_maxes)[:, 0]
        return values[: len(values) // len(NAMES) * len(NAMES)].reshape(-1, len(NAMES))


class Delayed(JustInTime):
    """The kernel writes codes, with the scale of earlier steps; just in time until there is one."""

    def __init__(
        self,
        dev: Device,
        fp8: Fp8Options,
        scales: DelayedScales,
        rows: int,
        channels: int,
        dtype: DType,
    ):
        super().__init__(dev, fp8, scales, rows, dtype)
        self._half_gradient = tuple(
            dev.alloc(f"d_residual.{layout}", shape, fp8.gradient, "Activations")
            for layout, shape in (("q", (rows, channels)), ("q_t", (channels, rows)))
        )

    def _direct(
        self, slot: str, out: Tensor | None, q: Tensor | None, q_t: Tensor | None
    ) -> Target:
        return Target(out, self.scales.abs_max(slot), self.scales.fp8_out(slot, q, q_t))

    def input(self, temps: ExitStack, x: Activation, write: Write) -> Operand:
        if not self.scales.known:
            return super().input(temps, x, write)
        q, _ = self._codes(temps, x.slot, x.shape, transposed=False)
        write(self._direct(x.slot, None, q, x.codes))
        return self._fp8(x.slot, None, q, x.codes)

    def of_tensor(
        self, temps: ExitStack, slot: str, x: Tensor, *, measured: bool, transposed: bool
    ) -> Operand:
        if not self.scales.known:
            return super().of_tensor(temps, slot, x, measured=measured, transposed=transposed)
        q, q_t = self._codes(temps, slot, x.shape, transposed=transposed)
        largest = None if measured else self.scales.abs_max(slot)
        quantize.scaled(self.dev, x, self.scales.fp8_out(slot, q, q_t), abs_max=largest)
        return self._fp8(slot, x, q, q_t)

    def gradient(
        self, temps: ExitStack, slot: str, write: Write, *, out: Tensor, bias: bool
    ) -> Operand:
        if not self.scales.known:
            return super().gradient(temps, slot, write, out=out, bias=bias)
        q, q_t = self._codes(temps, slot, out.shape)
        source = out if bias else None
        write(self._direct(slot, source, q, q_t))
        return self._fp8(slot, source, q, q_t)

    def half_gradient_target(self, slot: str, d_out: Tensor) -> Target:
        if not self.scales.known:
            return super().half_gradient_target(slot, d_out)
        return self._direct(slot, d_out, *self._half_gradient)

    def half_gradient(self, temps: ExitStack, slot: str, d_out: Tensor) -> Operand:
        if not self.scales.known:
            return super().half_gradient(temps, slot, d_out)
        return self._fp8(slot, d_out, *self._half_gradient)

    # -- scales over the steps -------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.scales.known

    def start_micro_step(self, *, of_step: bool) -> None:
        if not (of_step and self.scales.known):  # they follow from all micro-steps of a step
            self.scales.forget()

    def calibrate(self) -> None:
        self.scales.calibrate()
        self.scales.forget()

    def finish_step(self, stats: Tensor) -> None:
        self.scales.finish_step(stats)

    def state(self) -> dict[str, list[float]]:
        return self.scales.state()

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        self.scales.load_state(state)
