"""Where the norms of a block stand: before each half, as in all architectures so far.

    stream = before + branch      the residual stream, and the output of the half before
    x = norm(stream)              the input of the half, whose output is the next branch

The addition happens inside the norm, so that what a half puts out stays beside the stream until the
next half (or the head) begins.
"""

from __future__ import annotations

from contextlib import ExitStack

from llmq.base.operand import Operand, Target
from llmq.base.tensor import Accumulator, Tensor
from llmq.config.model import ModelConfig
from llmq.model import norm
from llmq.model.activations import Norm
from llmq.model.operands import Operands
from llmq.runtime.device import Device


class PreNorm:
    """The norms of all halves of all blocks. branch: (rows, C), which all halves write."""

    def __init__(self, dev: Device, config: ModelConfig, operands: Operands, branch: Tensor):
        self.dev, self.eps, self.operands, self.branch = dev, config.norm_eps, operands, branch

    def forward(
        self,
        temps: ExitStack,
        here: Norm,
        before: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Operand:
        """The input of a half. before: the stream where the half before began, None: first half."""
        return self.operands.input(
            temps, here.out, lambda to: self._run(to, here, before, weight, bias)
        )

    def again(
        self,
        temps: ExitStack,
        here: Norm,
        before: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        *,
        product: bool,
    ) -> Operand:
        """The input of a half in backward. before: None unless the stream is to be made again too.

        product: the half's first product is computed again, too.
        """
        kept = self.operands.kept(here.out)
        if kept is not None:
            return kept
        return self.operands.input_again(
            temps,
            here.out,
            lambda to: self._run(to, here, before, weight, bias),
            product=product,
            out=None,
        )

    def _run(
        self, to: Target, here: Norm, before: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> None:
        stream, stats, dev, eps = here.stream, here.stats, self.dev, self.eps
        if before is None:
            norm.forward(dev, to, stats, stream, weight, bias, eps)
        else:
            norm.forward_residual(dev, stream, to, stats, before, self.branch, weight, bias, eps)

    def backward(
        self,
        here: Norm,
        slot_before: str | None,
        d_residual: Tensor,
        d_x: Tensor,
        weight: Tensor,
        d_weight: Accumulator | None,
        d_bias: Accumulator | None,
    ) -> None:
        """d_residual (rows, C) += the gradient of the stream by way of x, whose gradient is d_x.

        Before and after it is the gradient of the stream behind and in front of the half; the
        latter is also that of the output of the half before, whose name is slot_before.
        """
        to = Target(d_residual)
        if slot_before is not None:
            to = self.operands.half_gradient_target(slot_before, d_residual)
        norm.backward(
            self.dev, to, d_weight, d_bias, d_x, here.stream, weight, here.stats, d_residual
        )
