"""What the products of a model multiply: its activations and their gradients.

An *operand* (`base/operand.py`) is what a product takes: a tensor, or the fp8 *codes* of one with
their *scale*. Codes of activations are made here, in every pass, with the scales of `scales.py`;
those of weights are made after every update in `state/quants.py`. There are three ways:

    Plain        the tensor itself
    JustInTime   the kernel writes a tensor and records its largest value, codes are made of these
    Delayed      the scale is known from earlier steps: the kernel writes the codes itself

JustInTime and Delayed are in `fp8_operands.py`, with `make_operands`, which chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from llmq.base.dtypes import DType
from llmq.base.operand import Operand, Target
from llmq.base.tensor import Tensor
from llmq.model.activations import Activation
from llmq.runtime.device import Device

INPUTS = ("ln1", "att", "ln2", "mlp_act")
GRADIENTS = ("d_mlp", "d_mlp_up", "d_att", "d_qkv")  # d_mlp, d_att: of the output of that half
NAMES = INPUTS + GRADIENTS
HEAD = "norm"  # the LM head's input

Write = Callable[[Target], None]
"""Enqueues the kernel that makes a tensor, given where it goes; it is called once."""
InputAgain = Callable[..., Operand]
"""Makes the input of half a block again, for backward; `product` is as in Operands.input_again."""


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


class Operands(ABC):
    """Makes the operands of all layers and of the head; `slot` names a tensor among all of them.

    An operand's memory is scratch and lives as long as `temps`, but for what is kept for backward.
    """

    def __init__(self, dev: Device, rows: int, dtype: DType, fp8: Fp8Options | None = None):
        """rows, dtype: of every tensor; the head's have fewer rows. fp8: None in Plain."""
        self.dev, self.rows, self.dtype, self.fp8 = dev, rows, dtype, fp8

    @abstractmethod
    def input(self, temps: ExitStack, x: Activation, write: Write) -> Operand:
        """A product's input, in the forward pass; what x has room for is kept for backward."""

    @abstractmethod
    def kept(self, x: Activation) -> Operand | None:
        """In backward: a product's input for its weight's gradient, None if it was not kept."""

    @abstractmethod
    def input_again(
        self, temps: ExitStack, x: Activation, write: Write, *, product: bool, out: Tensor | None
    ) -> Operand:
        """A product's input, in backward, for its weight's gradient.

        write makes it again with the content it had in forward. product: the product is computed
        again, too. out: memory of the input's shape that nobody needs any more, or None.
        """

    @abstractmethod
    def of_tensor(
        self, temps: ExitStack, slot: str, x: Tensor, *, measured: bool, transposed: bool
    ) -> Operand:
        """The operand of a tensor (n, features) that is there already.

        measured: its kernel wrote to the target that `measured` gives. transposed: a weight's
        gradient needs it, and not only a product.
        """

    @abstractmethod
    def of_tensor_again(self, temps: ExitStack, slot: str, x: Tensor, *, product: bool) -> Operand:
        """As of_tensor, in backward, for an input of a product; product: as in input_again."""

    @abstractmethod
    def measured(self, slot: str, out: Tensor) -> Target:
        """Where a kernel writes a tensor of which of_tensor makes an operand later."""

    @abstractmethod
    def gradient(
        self, temps: ExitStack, slot: str, write: Write, *, out: Tensor, bias: bool
    ) -> Operand:
        """The gradient of a product's output. out: memory of its shape.

        bias: the tensor itself is wanted besides, because a bias's gradient is its sum.
        """

    def half_gradient_target(self, slot: str, d_out: Tensor) -> Target:
        """Where a kernel writes the gradient d_out (rows, C) of the output of half a block."""
        return self.measured(slot, d_out)

    def half_gradient(self, temps: ExitStack, slot: str, d_out: Tensor) -> Operand:
        """The operand of d_out, which was written to half_gradient_target just before."""
        return self.of_tensor(temps, slot, d_out, measured=True, transposed=True)

    # -- scales over the steps: nothing to do where there are none, or where a pass makes them ----

    @property
    def ready(self) -> bool:
        """Whether there are the scales that are needed: False for delayed ones before the first."""
        return True

    def start_step(self) -> None:
        """Before the micro-steps of an optimizer step."""
        return

    def start_micro_step(self, *, of_step: bool) -> None:
        """Before a forward pass; of_step: of an optimizer step, else of an evaluation."""
        return

    def calibrate(self) -> None:
        """After a micro-step that was not ready: now scales are; begin anew."""
        return

    def finish_step(self, stats: Tensor) -> None:
        """Before the update of an optimizer step; stats: F64 (10,), sums of this rank. Launches."""
        return

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint holds of the scales."""
        return {}

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        """Take what `state` gave."""
        return

    def largest(self) -> np.ndarray:
        """F32 (layers, len(NAMES)): what is recorded of the blocks' tensors; waits for the device.

        No layers without fp8.
        """
        return np.empty((0, len(NAMES)), np.float32)


class Plain(Operands):
    """Products take tensors as they are."""

    def input(self, temps: ExitStack, x: Activation, write: Write) -> Operand:
        out = x.place(self.dev, temps)
        write(Target(out))
        return out

    def kept(self, x: Activation) -> Operand | None:
        return x.tensor

    def input_again(
        self, temps: ExitStack, x: Activation, write: Write, *, product: bool, out: Tensor | None
    ) -> Operand:
        out = out or x.place(self.dev, temps)
        write(Target(out))
        return out

    def of_tensor(
        self, temps: ExitStack, slot: str, x: Tensor, *, measured: bool, transposed: bool
    ) -> Operand:
        return x

    def of_tensor_again(self, temps: ExitStack, slot: str, x: Tensor, *, product: bool) -> Operand:
        return x

    def measured(self, slot: str, out: Tensor) -> Target:
        return Target(out)

    def gradient(
        self, temps: ExitStack, slot: str, write: Write, *, out: Tensor, bias: bool
    ) -> Operand:
        write(Target(out))
        return out
