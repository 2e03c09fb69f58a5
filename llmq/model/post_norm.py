"""Where the norms of a block stand in OLMo-2: behind each half.

    stream = before + norm(branch)      the residual stream, and the output of the half before
    x = stream                          the input of the half, whose output is the next branch

As in `pre_norm.py`, whose calls these are, a half's output waits beside the stream until the next
half (or the head) begins. It is kept for backward, the stream itself takes the place of x.
"""

from __future__ import annotations

from contextlib import ExitStack

from llmq.base.operand import Operand, Target
from llmq.base.tensor import Tensor
from llmq.model.activations import NormSite
from llmq.model.parameters import BlockGrads, BlockWeights
from llmq.model.pre_norm import PreNorm
from llmq.ops.add import add


class PostNorm(PreNorm):
    """The norms of all halves of all blocks. There is none in front of the first half."""

    def forward(
        self, temps: ExitStack, here: NormSite, before: Tensor | None, w: BlockWeights
    ) -> Operand:
        slot, stream, measured = here.out.slot, here.stream, before is not None
        if measured:
            self._run(here, before, w, self.operands.measured(slot, stream))
        return self.operands.of_tensor(temps, slot, stream, measured=measured, transposed=False)

    def again(
        self,
        temps: ExitStack,
        here: NormSite,
        before: Tensor | None,
        w: BlockWeights,
        *,
        product: bool,
    ) -> Operand:
        if before is not None:
            self._run(here, before, w, Target(here.stream))
        return self.operands.of_tensor_again(temps, here.out.slot, here.stream, product=product)

    def _run(self, here: NormSite, before: Tensor, w: BlockWeights, to: Target) -> None:
        weight, _ = here.parameters(w)
        self.norm.post(to, here.stats, here.branch, before, weight)

    def d_out(self, d_residual: Tensor, d_x: Tensor) -> Tensor:
        return d_x

    def backward(
        self,
        here: NormSite,
        slot_before: str | None,
        d_residual: Tensor,
        d_x: Tensor,
        w: BlockWeights,
        g: BlockGrads,
    ) -> None:
        """d_residual (rows, C) += d_x, the gradient of the half's input.

        Then d_x is the gradient of the output of the half before, whose name is slot_before.
        """
        add(self.norm.dev, d_residual, d_residual, d_x)
        if slot_before is None:
            return
        to, past = self.operands.half_gradient_target(slot_before, d_x), None
        (weight, _), (d_weight, d_bias) = here.parameters(w), here.parameters(g)
        self.norm.backward(to, d_weight, d_bias, d_residual, here.branch, weight, here.stats, past)
