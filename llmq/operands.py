"""What the products of a block multiply: its tensors as they are, or quantized to fp8.

Per-tensor just-in-time scaling: every tensor that gets quantized has a slot for its largest
absolute value, filled by the kernel that produces the tensor, and one for its scale. Slots are kept
from forward to backward, so that a recomputed activation is quantized to the same bits.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from llmq.dtypes import F32, DType
from llmq.linear import Amount, Fp8, Operand, quantized
from llmq.ops import abs_max
from llmq.runtime.device import Device
from llmq.runtime.tensor import Tensor

INPUTS = ("ln1", "att", "ln2", "mlp_act")
GRADIENTS = ("d_mlp", "d_mlp_up", "d_att", "d_qkv")  # d_mlp, d_att: d_residual as that half gets it
NAMES = INPUTS + GRADIENTS
STRIDE = 4  # floats: scale pointers must be 16-byte aligned for cuBLASLt


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Options:
    """Formats of values (E4M3) and of output gradients (E4M3 or E5M2)."""

    value: DType
    gradient: DType


class Operands:
    """The slots of all layers. fp8 None: products take the tensors themselves."""

    def __init__(self, dev: Device, fp8: Fp8Options | None, num_layers: int):
        self.dev, self.fp8 = dev, fp8
        if fp8 is not None:
            shape = (num_layers * len(NAMES), STRIDE)
            self.abs_maxes = dev.alloc("abs_maxes", shape, F32, "Activations")
            self.scales = dev.alloc("scales", shape, F32, "Activations")

    def start(self) -> None:
        """Forget the values of the last micro-step."""
        if self.fp8 is not None:
            self.dev.zero(self.abs_maxes)

    def _slot(self, table: Tensor, index: int, name: str) -> Tensor:
        row = index * len(NAMES) + NAMES.index(name)
        return table.view(table.size).rows(row * STRIDE, row * STRIDE + 1)

    def abs_max(self, index: int, name: str) -> Tensor | None:
        """Where the kernel that produces a tensor records its largest absolute value."""
        return None if self.fp8 is None else self._slot(self.abs_maxes, index, name)

    def measure(self, index: int, name: str, x: Tensor) -> None:
        """Record the largest absolute value of a tensor whose producer does not."""
        slot = self.abs_max(index, name)
        if slot is not None:
            abs_max.abs_max(self.dev, slot, x)

    def _amount(self, index: int, name: str) -> Amount:
        scale = self._slot(self.scales, index, name)
        return Amount(abs_max=self._slot(self.abs_maxes, index, name), scale=scale)

    def input(
        self,
        temps: ExitStack,
        index: int,
        name: str,
        x: Tensor,
        *,
        transposed: bool,
        kept: Tensor | None = None,
    ) -> Operand:
        """The input x of a forward product. transposed: also for the weight gradient.

        kept: where the transposed layout is kept until backward.
        """
        if self.fp8 is None:
            return x
        amount, dtype = self._amount(index, name), self.fp8.value
        return quantized(
            self.dev, temps, x, amount, dtype, transposed=transposed, transposed_to=kept
        )

    def input_again(
        self, temps: ExitStack, index: int, name: str, x: Tensor | None, kept: Tensor | None
    ) -> Operand:
        """In backward: an input for its weight's gradient, kept transposed or made from x."""
        if self.fp8 is None:
            return x
        amount = self._amount(index, name)
        if kept is not None:
            return Fp8(source=None, codes=None, transposed=kept, scale=amount.scale)
        return quantized(self.dev, temps, x, amount, self.fp8.value, codes=False)

    def gradient(self, temps: ExitStack, index: int, name: str, d_out: Tensor) -> Operand:
        """An output gradient for both of its products."""
        if self.fp8 is None:
            return d_out
        return quantized(self.dev, temps, d_out, self._amount(index, name), self.fp8.gradient)
