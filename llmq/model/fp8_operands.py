"""Operands in fp8: the two ways in which a tensor gets its scale and its codes.

Codes lie in two layouts, (rows, features) for products and (features, rows) for weights' gradients
(`linear.py` says why). What is made again in backward has a scale from forward, so that the kernel
which makes it writes its codes and no tensor, in both ways.

Scratch is a stack: codes of a tensor that is gone before them are taken before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from llmq.arch.matrix import halves_gradients, halves_inputs
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E4M3, E4M3_MAX, E5M2, E5M2_MAX, DType, parse_dtype
from llmq.base.operand import Fp8, Operand, Result, Target
from llmq.base.tensor import Tensor
from llmq.model.activations import Activation, needed_inputs, slot
from llmq.model.operands import HEAD, Operands, Write
from llmq.model.scales import DelayedScales, Scales
from llmq.ops import abs_max, quantize
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device

MAX = {E4M3: E4M3_MAX, E5M2: E5M2_MAX}


def make_operands(
    dev: Device, config: ModelConfig, options: TrainConfig, shape: tuple[int, int]
) -> Operands:
    """Of a model whose activations have this shape, (rows, C), at the ends of its blocks."""
    dtype = parse_dtype(options.model_dtype)
    if not options.is_fp8:
        return Operands(dev, shape, dtype)
    gradient = parse_dtype(options.gradient_dtype)
    layers = [config.halves(layer) for layer in range(config.num_layers)]
    formats: dict[str, DType] = {}
    limits: dict[str, float] = {}
    products: list[str] = []
    for layer, halves in enumerate(layers):
        names = dict.fromkeys(halves_inputs(halves), E4M3)
        names |= dict.fromkeys(halves_gradients(halves), gradient)
        if options.mlp_dtype == "e4m3":
            coded = [name for half in halves for name in half.coded]
            names |= {name: gradient if name.startswith("d_") else E4M3 for name in coded}
            products += [slot(layer, name) for name in coded]
        formats |= names
        limits |= {slot(layer, name): MAX[dtype] for name, dtype in names.items()}
    if options.head_dtype == "e4m3":
        formats[HEAD] = E4M3
        limits[HEAD] = E4M3_MAX
    adapted = None
    if options.has_adapters:
        adapted = frozenset(
            slot(layer, name)
            for layer in range(config.num_layers)
            for matrix in config.matrices(layer)
            if matrix.key in needed_inputs(config, options, layer)
            for name in (matrix.input, matrix.gradient)
        )
    if options.fp8_recipe == "delayed":
        scales = DelayedScales(dev, limits, products)
        return Delayed(dev, shape, dtype, formats, scales, gradient, adapted=adapted)
    return JustInTime(dev, shape, dtype, formats, Scales(dev, limits), adapted=adapted)


class JustInTime(Operands):
    """The kernel writes a tensor and records its largest value; its scale and codes follow."""

    def __init__(
        self,
        dev: Device,
        shape: tuple[int, int],
        dtype: DType,
        formats: Mapping[str, DType],
        scales: Scales,
        *,
        adapted: frozenset[str] | None = None,
    ):
        """formats: of codes, by name of a layer's tensor. scales: with a slot for each tensor.

        adapted: the slots of tensors that adapters multiply as they are; None where there
        are none, and gradients of matrices need transposed codes.
        """
        super().__init__(dev, shape, dtype)
        self.formats, self.scales, self.adapted = formats, scales, adapted

    def _keeps(self, slot: str) -> bool:
        """Whether the tensor is wanted beside its codes."""
        return self.adapted is not None and slot in self.adapted

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
        dtype, q, q_t = self.formats[name], None, None
        transposed = transposed and (self.adapted is None or name == HEAD)
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
        kept = x.place(self.dev, temps) if self._keeps(x.slot) else None
        q, _ = self._codes(temps, x.slot, x.shape, transposed=False)
        with ExitStack() as inner:
            source = kept or x.place(self.dev, inner)
            write(self.measured(x.slot, source))
            self._quantize(x.slot, q, x.codes, source)
        return self._fp8(x.slot, kept, q, x.codes)

    def kept(self, x: Activation) -> Operand | None:
        if x.codes is None and x.tensor is None:
            return None
        return self._fp8(x.slot, x.tensor, None, x.codes)

    def input_again(
        self, temps: ExitStack, x: Activation, write: Write, *, product: bool
    ) -> Operand:
        kept = x.place(self.dev, temps) if self._keeps(x.slot) else None
        q, q_t = self._codes(temps, x.slot, x.shape, product=product)
        codes = self.scales.fp8_out_again(x.slot, q, q_t) if q or q_t else None
        write(Target(kept, None, codes))
        return self._fp8(x.slot, kept, q, q_t)

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
        if q or q_t:
            quantize.scaled(self.dev, x, self.scales.fp8_out_again(slot, q, q_t))
        return self._fp8(slot, x, q, q_t)

    def measured(self, slot: str, out: Tensor) -> Target:
        return Target(out, self.scales.abs_max(slot))

    def largest(self) -> dict[tuple[int, str], float]:
        values, found = self.dev.download(self.scales.abs_maxes)[:, 0].tolist(), {}
        for name, value in zip(self.scales.names, values, strict=True):
            if name != HEAD:
                _, layer, tensor = name.split(".")
                found[int(layer), tensor] = value
        return found


class Delayed(JustInTime):
    """The kernel writes codes, with the scale of earlier steps; just in time until there is one."""

    def __init__(
        self,
        dev: Device,
        shape: tuple[int, int],
        dtype: DType,
        formats: Mapping[str, DType],
        scales: DelayedScales,
        gradient: DType,
        *,
        adapted: frozenset[str] | None = None,
    ):
        """gradient: the format of gradients; the rest as above."""
        super().__init__(dev, shape, dtype, formats, scales, adapted=adapted)

        def alloc(layout: str, lies: tuple[int, int]) -> Tensor:
            return dev.alloc(f"d_residual.{layout}", lies, gradient, "Activations")

        q_t = alloc("q_t", shape[::-1]) if adapted is None else None
        self._half_gradient = (alloc("q", shape), q_t)
        self._coded = bool(scales.products)  # whether products write codes

    def _direct(
        self, slot: str, out: Tensor | None, q: Tensor | None, q_t: Tensor | None
    ) -> Target:
        return Target(out, self.scales.abs_max(slot), self.scales.fp8_out(slot, q, q_t))

    def input(self, temps: ExitStack, x: Activation, write: Write) -> Operand:
        if not self.scales.ready:
            return super().input(temps, x, write)
        kept = x.place(self.dev, temps) if self._keeps(x.slot) else None
        q, _ = self._codes(temps, x.slot, x.shape, transposed=False)
        write(self._direct(x.slot, kept, q, x.codes))
        return self._fp8(x.slot, kept, q, x.codes)

    def of_tensor(
        self, temps: ExitStack, slot: str, x: Tensor, *, measured: bool, transposed: bool
    ) -> Operand:
        if not self.scales.ready:
            return super().of_tensor(temps, slot, x, measured=measured, transposed=transposed)
        q, q_t = self._codes(temps, slot, x.shape, transposed=transposed)
        largest = None if measured else self.scales.abs_max(slot)
        quantize.scaled(self.dev, x, self.scales.fp8_out(slot, q, q_t), abs_max=largest)
        return self._fp8(slot, x, q, q_t)

    # Without scales, what is never there but as codes is written twice: with any scale for its
    # largest value, and with the scale that follows from it. Another form would need memory that
    # no later step needs.

    def result(
        self, slot: str, out: Tensor | None, multiply: Callable[[Result | None], None]
    ) -> Result | None:
        if not self._coded:
            return super().result(slot, out, multiply)
        codes = self.scales.product(slot, out)
        multiply(codes)
        if not self.scales.ready:
            self.scales.settle(slot)
            multiply(codes)
        return codes

    def result_again(self, slot: str, out: Tensor) -> Result:
        return self.scales.product(slot, out, again=True) if self._coded else out

    def written(self, slot: str, launch: Callable[[], None]) -> None:
        launch()
        if self._coded and not self.scales.ready:
            self.scales.settle(slot)
            launch()

    def gradient(
        self,
        temps: ExitStack,
        slot: str,
        write: Write,
        *,
        shape: tuple[int, int],
        out: Tensor | None,
        bias: bool,
    ) -> Operand:
        # RoPE backward writes the tensor or its codes.
        keeps = self._keeps(slot)
        known = self.scales.ready or (self._coded and slot.endswith("d_mlp_up"))
        if (keeps and slot.endswith("d_qkv")) or not known:
            return super().gradient(temps, slot, write, shape=shape, out=out, bias=bias)
        q, q_t = self._codes(temps, slot, shape)
        source = out if bias or keeps else None
        write(self._direct(slot, source, q, q_t))
        return self._fp8(slot, source, q, q_t)

    def half_gradient_target(self, slot: str, d_out: Tensor) -> Target:
        if not self.scales.ready:
            return super().half_gradient_target(slot, d_out)
        return self._direct(slot, d_out, *self._half_gradient)

    def half_gradient(self, temps: ExitStack, slot: str, d_out: Tensor) -> Operand:
        if not self.scales.ready:
            return super().half_gradient(temps, slot, d_out)
        return self._fp8(slot, d_out, *self._half_gradient)
