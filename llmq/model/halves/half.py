"""The work of a half of a block: in a step, in an evaluation, and when a text is continued.

A kind of half is a class in a file of its own and a line of `HALVES`. One object computes the
halves of its kind in all layers: what differs from layer to layer is in `here`, with what the
architecture declares (`here.spec`), what `keep` has returned (`here.kept`), and the tensors of a
text that is continued (`here.cache`). A `Frame` has that, and the differences from pass to pass.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from llmq.arch.model_config import ModelConfig
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.formats.format import Format, InputAgain
from llmq.model.activations import Frame, HalfLayer, Recompute
from llmq.model.balance import Balance
from llmq.model.block_linear import BlockLinear
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device


class Shared(NamedTuple):
    """The objects with which all halves of a model work. backend: of attention, as `directions`
    takes it. positions: of the longest text. starts: I32 (B,T), of documents; None: all are 0.
    balance: of experts; None where nothing is trained."""

    dev: Device
    config: ModelConfig
    options: TrainConfig
    operands: Format
    linear: BlockLinear
    backend: str
    positions: int
    starts: Tensor | None
    balance: Balance | None


class Half(Protocol):
    """Turns the output of a norm into a branch of the residual stream. rows = B*T."""

    def __init__(self, shared: Shared): ...

    def keeps_input(self, recompute: Recompute) -> bool:
        """Whether the half's input may be kept for backward: False where it is made again."""

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        """Keys of the matrices whose products backward computes again."""

    def keep(self, here: HalfLayer) -> Any:
        """Allocates what a layer keeps from forward to backward."""

    def forward(self, at: Frame, x: Operand) -> None:
        """here.out from x (rows, C). With here.cache it reads what the positions before at.position
        have left there, and writes what those behind this pass will read, T positions from
        at.position on."""

    def recompute(self, at: Frame, x_again: InputAgain) -> Any:
        """The tensors that backward needs, kept or computed again; if the whole block is, here.out
        too."""

    def backward(
        self, at: Frame, inputs: Any, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """d_x (rows, C), if it is wanted, and the weights' gradients, from d_out (rows, C). inside:
        whether a gradient in front of the matrix that makes the output is wanted; else what leads
        there may be left out."""


class Output:
    """The products of all layers with one matrix, of what is made of the product before (rows, n).
    tensor_id: names that tensor for its format."""

    def __init__(self, shared: Shared, key: str):
        self.operands, self.linear, self.key = shared.operands, shared.linear, key

    def forward(self, at: Frame, tensor_id: str, x: Tensor) -> None:
        """here.out from x."""
        how = {"measured": False, "transposed": False}
        self._multiply(at, self.operands.of_tensor(at.temps, tensor_id, x, **how))

    def _multiply(self, at: Frame, x: Operand) -> None:
        out, addend = at.here.out
        self.linear.forward(at, self.key, out, x, addend)

    def again(self, at: Frame, tensor_id: str, made: Callable[[], Tensor]) -> Operand | None:
        """The operand that backward needs, None if it needs none; here.out too, if the whole block
        is computed again. made: makes x."""
        whole = at.here.recompute.block
        if not whole and not self.linear.needs_input(at, self.key):
            return None
        operand = self.operands.of_tensor_again(at.temps, tensor_id, made(), product=whole)
        if whole:
            self._multiply(at, operand)
        return operand

    def backward(
        self, at: Frame, operand: Operand | None, d_out: Tensor, d_x: Tensor | None
    ) -> None:
        """d_x, if it is wanted, and the weight's gradients. operand: as of `again`."""
        how = {"measured": True, "transposed": True}
        with ExitStack() as temps:
            d_o = self.operands.of_tensor(temps, at.here.out_id, d_out, **how)
            self.linear.input_gradient(at, self.key, d_x, d_o)
            self.linear.weight_gradients(at, self.key, d_o, operand)
