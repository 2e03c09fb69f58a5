"""What the products of a model multiply: its activations and their gradients.

An *operand* (`base/operand.py`) is what a product takes: a tensor, or the fp8 *codes* of one with
their *scale*. Codes of activations are made here, in every pass, with the scales of `scales.py`;
those of weights are made after every update in `state/quants.py`. There are three ways:

    Operands     the tensor itself
    JustInTime   the kernel writes a tensor and records its largest value, codes are made of these
    Delayed      the scale is known from earlier steps: the kernel writes the codes itself

JustInTime and Delayed are in `fp8_operands.py`, with `make_operands`, which chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from llmq.base.dtypes import DType
from llmq.base.operand import Operand, Result, Target
from llmq.base.tensor import Tensor
from llmq.model.activations import Activation
from llmq.model.scales import NoScales
from llmq.runtime.device import Device

HEAD = "norm"  # the LM head's input

Write = Callable[[Target], None]
"""Enqueues the kernel that makes a tensor, given where it goes; it is called once."""
InputAgain = Callable[..., Operand]
"""Makes the input of half a block again, for backward; `product` is as in Operands.input_again."""


class Operands:
    """Makes the operands of all layers and of the head: here products take tensors as they are.

    slot: names a tensor among all of them. An operand's memory is scratch and lives as long as
    `temps`, but for what is kept for backward.
    """

    def __init__(self, dev: Device, shape: tuple[int, int], dtype: DType):
        """shape: (rows, C), dtype: of the tensors between blocks; the head's have fewer rows."""
        self.dev, self.shape, self.dtype = dev, shape, dtype
        self.scales = NoScales()

    def input(self, temps: ExitStack, x: Activation, write: Write) -> Operand:
        """A product's input, in the forward pass; what x has room for is kept for backward."""
        out = x.place(self.dev, temps)
        write(Target(out))
        return out

    def kept(self, x: Activation) -> Operand | None:
        """In backward: a product's input for its weight's gradient, None if it was not kept."""
        return x.tensor

    def input_again(
        self, temps: ExitStack, x: Activation, write: Write, *, product: bool
    ) -> Operand:
        """A product's input, in backward, for its weight's gradient.

        write makes it again with the content it had in forward. product: the product is computed
        again, too.
        """
        out = x.place(self.dev, temps)
        write(Target(out))
        return out

    def of_tensor(
        self, temps: ExitStack, slot: str, x: Tensor, *, measured: bool, transposed: bool
    ) -> Operand:
        """The operand of a tensor (n, features) that is there already.

        measured: its kernel wrote to the target that `measured` gives. transposed: a weight's
        gradient needs it, and not only a product.
        """
        return x

    def of_tensor_again(self, temps: ExitStack, slot: str, x: Tensor, *, product: bool) -> Operand:
        """As of_tensor, in backward, for an input of a product; product: as in input_again."""
        return x

    def measured(self, slot: str, out: Tensor) -> Target:
        """Where a kernel writes a tensor of which of_tensor makes an operand later."""
        return Target(out)

    def result(
        self, slot: str, out: Tensor | None, multiply: Callable[[Result | None], None]
    ) -> Result | None:
        """What a product writes to `out`, which may be of codes; multiply enqueues it.

        out: None, once scales are ready, of a product that has the activation in it and whose
        result is not kept.
        """
        multiply(out)
        return out

    def result_again(self, slot: str, out: Tensor) -> Result:
        """The same in backward: where it was kept, or is to be written again."""
        return out

    def written(self, slot: str, launch: Callable[[], None]) -> None:
        """Enqueue the kernel that writes the target of `gradient`, given this slot."""
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
        """The gradient of a product's output. out: memory of its shape; None: if its result is
        codes, and bias is False.

        bias: the tensor itself is wanted besides, because a bias's gradient is its sum.
        """
        write(self.measured(slot, out))
        return self.of_tensor(temps, slot, out, measured=True, transposed=True)

    def half_gradient_target(self, slot: str, d_out: Tensor) -> Target:
        """Where a kernel writes the gradient d_out (rows, C) of the output of half a block."""
        return self.measured(slot, d_out)

    def half_gradient(self, temps: ExitStack, slot: str, d_out: Tensor) -> Operand:
        """The operand of d_out, which was written to half_gradient_target just before."""
        return self.of_tensor(temps, slot, d_out, measured=True, transposed=True)

    def largest(self) -> dict[tuple[int, str], float]:
        """What is recorded of the blocks' tensors, by layer and name; waits for the device.

        Nothing without fp8.
        """
        return {}
