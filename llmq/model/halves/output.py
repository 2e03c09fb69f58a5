"""The product with which a half ends that computes between two products: attention, delta nets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.model.activations import HalfLayer
from llmq.model.halves.half import Shared
from llmq.model.parameters import BlockGrads, BlockWeights


class Output:
    """The products of all layers with one matrix, of what is made of the product before (rows, n).

    tensor_id: names that tensor for its format.
    """

    def __init__(self, shared: Shared, key: str):
        self.operands, self.linear, self.key = shared.operands, shared.linear, key

    def forward(
        self, temps: ExitStack, here: HalfLayer, w: BlockWeights, tensor_id: str, x: Tensor
    ) -> None:
        """here.out from x."""
        operand = self.operands.of_tensor(temps, tensor_id, x, measured=False, transposed=False)
        out, addend = here.out
        self.linear.forward(here.index, self.key, out, operand, w, addend)

    def again(
        self,
        temps: ExitStack,
        here: HalfLayer,
        w: BlockWeights,
        g: BlockGrads,
        tensor_id: str,
        made: Callable[[], Tensor],
    ) -> Operand | None:
        """The operand that backward needs, None if it needs none; here.out too, if the whole block
        is computed again. made: makes x."""
        whole = here.recompute.block
        if not whole and not self.linear.needs_input(here.index, self.key, g):
            return None
        operand = self.operands.of_tensor_again(temps, tensor_id, made(), product=whole)
        if whole:
            out, addend = here.out
            self.linear.forward(here.index, self.key, out, operand, w, addend)
        return operand

    def backward(
        self,
        here: HalfLayer,
        w: BlockWeights,
        g: BlockGrads,
        operand: Operand | None,
        d_out: Tensor,
        d_x: Tensor | None,
    ) -> None:
        """d_x, if it is wanted, and the weight's gradients. operand: as of `again`."""
        with ExitStack() as temps:
            d_o = self.operands.of_tensor(temps, here.out_id, d_out, measured=True, transposed=True)
            self.linear.input_gradient(here.index, self.key, d_x, d_o, w, g)
            self.linear.weight_gradients(here.index, self.key, w, g, g.bias(self.key), d_o, operand)
