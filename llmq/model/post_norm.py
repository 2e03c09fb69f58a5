"""Where the norms of a block stand in OLMo-2: behind each half.

    stream = before + norm(branch)      the residual stream, and the output of the half before
    x = stream                          the input of the half, whose output is the next branch

As in `pre_norm.py`, whose calls these are, a half's output waits beside the stream until the next
half (or the head) begins. It is kept for backward, the stream itself takes the place of x.
"""

from __future__ import annotations

from contextlib import ExitStack

from llmq.base.operand import Operand, Target
from llmq.base.tensor import Accumulator, Tensor
from llmq.config.model import ModelConfig
from llmq.model.activations import NormSite
from llmq.model.norm import Normalization
from llmq.model.operands import Operands
from llmq.ops.add import add
from llmq.runtime.device import Device


class PostNorm:
    """The norms of all halves of all blocks. There is none in front of the first half."""

    def __init__(self, dev: Device, config: ModelConfig, operands: Operands):
        self.dev, self.norm, self.operands = dev, Normalization(dev, config), operands

    def forward(
        self,
        temps: ExitStack,
        here: NormSite,
        before: Tensor | None,
        w: Tensor | None,
        b: Tensor | None,
    ) -> Operand:
        """The input of a half. before: the stream where the half before began, None: first half."""
        slot, stream = here.out.slot, here.stream
        if before is not None:
            self._run(self.operands.measured(slot, stream), here, before, w)
        measured = before is not None
        return self.operands.of_tensor(temps, slot, stream, measured=measured, transposed=False)

    def again(
        self,
        temps: ExitStack,
        here: NormSite,
        before: Tensor | None,
        w: Tensor | None,
        b: Tensor | None,
        *,
        product: bool,
    ) -> Operand:
        """The input of a half in backward. before: None unless the stream is to be made again too.

        product: the half's first product is computed again, too.
        """
        if before is not None:
            self._run(Target(here.stream), here, before, w)
        return self.operands.of_tensor_again(temps, here.out.slot, here.stream, product=product)

    def _run(self, to: Target, here: NormSite, before: Tensor, w: Tensor) -> None:
        self.norm.post(to, here.stats, here.branch, before, w)

    def d_out(self, d_residual: Tensor, d_x: Tensor) -> Tensor:
        """Where `backward` leaves the gradient of the output of the half before."""
        return d_x

    def backward(
        self,
        here: NormSite,
        slot_before: str | None,
        d_residual: Tensor,
        d_x: Tensor,
        w: Tensor | None,
        d_w: Accumulator | None,
        d_b: Accumulator | None,
    ) -> None:
        """d_residual (rows, C) += d_x, the gradient of the half's input.

        Then d_x is the gradient of the output of the half before, whose name is slot_before.
        """
        add(self.dev, d_residual, d_residual, d_x)
        if slot_before is None:
            return
        to, past = self.operands.half_gradient_target(slot_before, d_x), None
        self.norm.backward(to, d_w, d_b, d_residual, here.branch, w, here.stats, past)
