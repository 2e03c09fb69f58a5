"""What the products of a model multiply: its tensors as they are, or quantized to fp8.

Where a scale is known (`scales.py`) the kernel that makes the tensor writes its codes; else it
writes the tensor and records its largest value, and the codes are made from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from llmq.base.dtypes import E4M3, E4M3_MAX, E5M2, E5M2_MAX, DType
from llmq.base.operand import Fp8, Operand, Target
from llmq.base.tensor import Tensor
from llmq.model.linear import EXACT, Fast
from llmq.model.scales import Scales
from llmq.ops import abs_max, quantize
from llmq.runtime.device import Device

INPUTS = ("ln1", "att", "ln2", "mlp_act")
GRADIENTS = ("d_mlp", "d_mlp_up", "d_att", "d_qkv")  # d_mlp, d_att: d_residual as that half gets it
NAMES = INPUTS + GRADIENTS
HEAD = "norm"  # the LM head's input
MAX = {E4M3: E4M3_MAX, E5M2: E5M2_MAX}


def slot(layer: int, name: str) -> str:
    """The name of a block's tensor among those of all blocks."""
    return f"layers.{layer}.{name}"


def _short(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Options:
    """Formats of values (E4M3) and of output gradients (E4M3 or E5M2), and how they are used.

    delayed: scales come from earlier steps. head: the LM head's products are in fp8 too.
    fast: which products may sum with fewer bits, as --fp8-fast-accumulation says.
    """

    value: DType
    gradient: DType
    delayed: bool = False
    head: bool = False
    fast: str = "none"


# By --fp8-fast-accumulation: in blocks, and in the head. What is lost grows with the length of the
# sums: over features in most products, over tokens in weights' gradients, and over the vocabulary
# in the gradient of the head's input.
FAST = {
    "none": (EXACT, EXACT),
    "forward": (Fast(forward=True), Fast(forward=True)),
    "activations": (Fast(forward=True, d_x=True), Fast(forward=True)),
    "all": (Fast(forward=True, d_x=True, d_weight=True),) * 2,
}


@dataclass(slots=True)
class Making:
    """A tensor that a kernel is about to make. operand: it, once it is made."""

    target: Target
    operand: Operand | None = None


class Operands:
    """Of all layers and the head. Tensors of blocks are named by their layer and their name there.

    fp8 None: products take the tensors themselves. rows: of every tensor, but for the head's.
    """

    def __init__(
        self,
        dev: Device,
        fp8: Fp8Options | None,
        num_layers: int,
        rows: int,
        channels: int,
        dtype: DType,
    ):
        self.dev, self.fp8, self.rows, self.dtype = dev, fp8, rows, dtype
        self.scales: Scales | None = None
        self._passing: tuple[Tensor, Tensor] | None = None
        if fp8 is None:
            return
        limits = {
            slot(layer, name): MAX[self._format(name)]
            for layer in range(num_layers)
            for name in NAMES
        }
        if fp8.head:
            limits[HEAD] = MAX[fp8.value]
        self.scales = Scales(dev, limits, delayed=fp8.delayed)
        if fp8.delayed:
            self._passing = tuple(
                dev.alloc(f"d_residual.{layout}", shape, fp8.gradient, "Activations")
                for layout, shape in (("q", (rows, channels)), ("q_t", (channels, rows)))
            )

    def _format(self, name: str) -> DType:
        return self.fp8.gradient if name in GRADIENTS else self.fp8.value

    @property
    def ready(self) -> bool:
        """Whether the recipe has the scales it needs: False for delayed ones before the first."""
        return self.scales is None or self.scales.known or not self.scales.delayed

    def start_step(self) -> None:
        """Before the micro-steps of an optimizer step."""
        if self.scales is not None:
            self.scales.forget()

    def start_micro_step(self, *, of_step: bool) -> None:
        """Before a forward pass; of_step: of an optimizer step, else of an evaluation.

        Delayed scales follow from all micro-steps of a step, others from those of one.
        """
        if self.scales is not None and not (of_step and self.scales.known):
            self.scales.forget()

    def calibrate(self) -> None:
        """After a micro-step that was not ready: now scales are; begin anew."""
        self.scales.calibrate()
        self.scales.forget()

    def finish_step(self, stats: Tensor) -> None:
        """Before the update of an optimizer step; stats: F64 (10,), sums of this rank. Launches."""
        if self.scales is not None:
            self.scales.finish_step(stats)

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint holds of the scales."""
        return {} if self.scales is None else self.scales.state()

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        """Take what `state` gave."""
        if self.scales is not None:
            self.scales.load_state(state)

    def largest(self) -> np.ndarray:
        """F32 (layers, len(NAMES)): what is recorded of the blocks' tensors; waits for the device.

        No layers without fp8.
        """
        if self.scales is None:
            return np.empty((0, len(NAMES)), np.float32)
        values = self.dev.download(self.scales.abs_maxes)[:, 0]
        return values[: len(values) // len(NAMES) * len(NAMES)].reshape(-1, len(NAMES))

    def abs_max(self, name: str) -> Tensor:
        """Where the kernel that makes a tensor records its largest absolute value, F32 (1,)."""
        return self.scales.abs_max(name)

    # -- one tensor ------------------------------------------------------------------------------

    @contextmanager
    def making(
        self,
        temps: ExitStack,
        name: str,
        features: int,
        *,
        out: Tensor | None = None,
        wanted: bool = False,
        codes: bool = True,
        transposed: bool = False,
        kept: Tensor | None = None,
        again: bool = False,
    ) -> Iterator[Making]:
        """A tensor (rows, features) that is made inside the `with` block.

        out: where it may be written as it is, else it gets scratch if it needs that. wanted: it is
        needed in there. codes, transposed: the layouts it is needed in. kept: where the transposed
        one goes. again: it was made before, with the same content. Scratch lives as long as temps.
        """
        layouts = (temps, name, self.rows, features, codes, transposed, kept)
        shape = (self.rows, features)
        if self.fp8 is None:
            target = out or self._scratch(temps, _short(name), *shape, self.dtype)
            yield Making(Target(target), target)
            return
        largest, scale = self.scales.abs_max(name), self.scales.scale(name)
        if self.scales.known or again:
            q, q_t = self._layouts(*layouts)
            source = out if wanted else None
            fp8 = self.scales.fp8_out(name, q, q_t, again=again)
            operand = Fp8(source=source, codes=q, transposed=q_t, scale=scale)
            yield Making(Target(source, None if again else largest, fp8), operand)
            return
        with ExitStack() as inner:
            if out is None:  # gone when its codes are there; these are below it on the stack
                q, q_t = self._layouts(*layouts)
                source = self._scratch(inner, _short(name), *shape, self.dtype)
            else:
                source = out
            made = Making(Target(source, largest))
            yield made
            if out is not None:
                q, q_t = self._layouts(*layouts)
            quantize.quantize(self.dev, q, q_t, scale, source, largest)
            made.operand = Fp8(source=out, codes=q, transposed=q_t, scale=scale)

    def quantized(
        self,
        temps: ExitStack,
        name: str,
        x: Tensor,
        *,
        measured: bool = False,
        codes: bool = True,
        transposed: bool = True,
        again: bool = False,
    ) -> Operand:
        """A tensor that was made as it is. measured: its largest value is recorded already."""
        if self.fp8 is None:
            return x
        largest, scale = self.scales.abs_max(name), self.scales.scale(name)
        q, q_t = self._layouts(temps, name, *x.shape, codes, transposed, None)
        if self.scales.known or again:
            fp8 = self.scales.fp8_out(name, q, q_t, again=again)
            quantize.scaled(self.dev, x, fp8, abs_max=None if measured or again else largest)
        else:
            if not measured:
                abs_max.abs_max(self.dev, largest, x)
            quantize.quantize(self.dev, q, q_t, scale, x, largest)
        return Fp8(source=x, codes=q, transposed=q_t, scale=scale)

    def kept(self, name: str, transposed: Tensor) -> Operand:
        """A tensor of which only the transposed codes were kept."""
        scale = self.scales.scale(name)
        return Fp8(source=None, codes=None, transposed=transposed, scale=scale)

    # -- the gradient of the residual stream, which one half of a block makes for another --------

    def passing(self, name: str, d_residual: Tensor) -> Target:
        """Where the kernel writes it that makes it."""
        if self.fp8 is None:
            return Target(d_residual)
        largest = self.scales.abs_max(name)
        if not self.scales.known:
            return Target(d_residual, largest)
        return Target(d_residual, largest, self.scales.fp8_out(name, *self._passing, again=False))

    def passed(self, temps: ExitStack, name: str, d_residual: Tensor) -> Operand:
        """It as an output gradient, before the next one is made."""
        if self.fp8 is None or not self.scales.known:
            return self.quantized(temps, name, d_residual, measured=True)
        codes, transposed = self._passing
        scale = self.scales.scale(name)
        return Fp8(source=d_residual, codes=codes, transposed=transposed, scale=scale)

    # -- scratch ---------------------------------------------------------------------------------

    def _layouts(
        self,
        temps: ExitStack,
        name: str,
        rows: int,
        features: int,
        codes: bool,
        transposed: bool,
        kept: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        name = _short(name)
        dtype = self._format(name)
        q = self._scratch(temps, f"{name}.q", rows, features, dtype) if codes else None
        if kept is None and transposed:
            kept = self._scratch(temps, f"{name}.q_t", features, rows, dtype)
        return q, kept

    def _scratch(
        self, temps: ExitStack, name: str, rows: int, features: int, dtype: DType
    ) -> Tensor:
        return temps.enter_context(self.dev.scratch(name, (rows, features), dtype))
