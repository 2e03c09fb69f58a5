"""Where the norms of a block stand in most architectures: before each half.

    stream = before + branch      the residual stream, and the output of the half before
    x = norm(stream)              the input of the half, whose output is the next branch

The addition happens inside the norm, so that what a half puts out stays beside the stream until the
next half (or the head) begins.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from llmq.base.operand import Operand, Target
from llmq.base.tensor import Tensor
from llmq.config.model import ModelConfig
from llmq.model.activations import NormSite
from llmq.model.norm import Normalization
from llmq.model.operands import Operands
from llmq.model.parameters import BlockGrads, BlockWeights
from llmq.runtime.device import Device


class PreNorm:
    """The norms of all halves of all blocks."""

    def __init__(self, dev: Device, config: ModelConfig, operands: Operands):
        self.norm, self.operands = Normalization(dev, config), operands

    def forward(
        self, temps: ExitStack, here: NormSite, before: Tensor | None, w: BlockWeights
    ) -> Operand:
        """The input of a half.

        before: (rows, C), the stream where the half before began; None: there is none.
        """
        return self.operands.input(temps, here.out, partial(self._run, here, before, w))

    def again(
        self,
        temps: ExitStack,
        here: NormSite,
        before: Tensor | None,
        w: BlockWeights,
        *,
        product: bool,
    ) -> Operand:
        """The input of a half in backward. before: None unless the stream is made again, too.

        product: so is the half's first product, and not only its weight's gradient needs the input.
        """
        kept = self.operands.kept(here.out)
        if kept is not None:
            return kept
        write = partial(self._run, here, before, w)
        return self.operands.input_again(temps, here.out, write, product=product, out=None)

    def _run(self, here: NormSite, before: Tensor | None, w: BlockWeights, to: Target) -> None:
        stream, stats, parameters = here.stream, here.stats, here.parameters(w)
        if before is None:
            self.norm.forward(to, stats, stream, *parameters)
        else:
            self.norm.forward_residual(stream, to, stats, before, here.branch, *parameters)

    def d_out(self, d_residual: Tensor, d_x: Tensor) -> Tensor:
        """Where `backward` leaves the gradient of the output of the half before."""
        return d_residual

    def backward(
        self,
        here: NormSite,
        slot_before: str | None,
        d_residual: Tensor,
        d_x: Tensor,
        w: BlockWeights,
        g: BlockGrads,
    ) -> None:
        """d_residual (rows, C), the gradient of the stream behind the half, to that in front of it.

        d_x (rows, C): the gradient of the half's input. The result is also the gradient of what the
        half before has put out; slot_before is its name, None where there is no half.
        """
        to = Target(d_residual)
        if slot_before is not None:
            to = self.operands.half_gradient_target(slot_before, d_residual)
        (weight, _), (d_weight, d_bias) = here.parameters(w), here.parameters(g)
        self.norm.backward(to, d_weight, d_bias, d_x, here.stream, weight, here.stats, d_residual)
