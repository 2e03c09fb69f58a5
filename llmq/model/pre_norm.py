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
from llmq.base.tensor import Accumulator, Tensor
from llmq.config.model import ModelConfig
from llmq.model.activations import NormSite
from llmq.model.norm import Normalization
from llmq.model.operands import Operands
from llmq.runtime.device import Device


class PreNorm:
    """The norms of all halves of all blocks."""

    def __init__(self, dev: Device, config: ModelConfig, operands: Operands):
        self.norm, self.operands = Normalization(dev, config), operands

    def forward(
        self, temps: ExitStack, here: NormSite, before: Tensor | None, w: Tensor, b: Tensor | None
    ) -> Operand:
        """The input of a half. w, b: weight and bias of the norm.

        before: (rows, C), the stream where the half before began; None: there is none.
        """
        return self.operands.input(temps, here.out, partial(self._run, here, before, w, b))

    def again(
        self,
        temps: ExitStack,
        here: NormSite,
        before: Tensor | None,
        w: Tensor,
        b: Tensor | None,
        *,
        product: bool,
    ) -> Operand:
        """The input of a half in backward. before: None unless the stream is made again, too.

        product: so is the half's first product, and not only its weight's gradient needs the input.
        """
        kept = self.operands.kept(here.out)
        if kept is not None:
            return kept
        write = partial(self._run, here, before, w, b)
        return self.operands.input_again(temps, here.out, write, product=product, out=None)

    def _run(
        self, here: NormSite, before: Tensor | None, w: Tensor, b: Tensor | None, to: Target
    ) -> None:
        stream, stats = here.stream, here.stats
        if before is None:
            self.norm.forward(to, stats, stream, w, b)
        else:
            self.norm.forward_residual(stream, to, stats, before, here.branch, w, b)

    def d_out(self, d_residual: Tensor, d_x: Tensor) -> Tensor:
        """Where `backward` leaves the gradient of the output of the half before."""
        return d_residual

    def backward(
        self,
        here: NormSite,
        slot_before: str | None,
        d_residual: Tensor,
        d_x: Tensor,
        w: Tensor,
        d_w: Accumulator | None,
        d_b: Accumulator | None,
    ) -> None:
        """d_residual (rows, C), the gradient of the stream behind the half, to that in front of it.

        d_x (rows, C): the gradient of the half's input. The result is also the gradient of what the
        half before has put out; slot_before is its name, None where there is no half.
        """
        to = Target(d_residual)
        if slot_before is not None:
            to = self.operands.half_gradient_target(slot_before, d_residual)
        self.norm.backward(to, d_w, d_b, d_x, here.stream, w, here.stats, d_residual)
