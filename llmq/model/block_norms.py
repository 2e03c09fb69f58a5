"""The norms of a block stand before each half, behind it, or both.

    stream = before + branch        the residual stream, and the output of the half before
    x = norm(stream)                the input of the half, whose output is the next branch

That is most architectures' way. Where norms stand behind the halves (`ln1_post`, `ln2_post`), it is
the branch's norm that is added; where none stands before them (no `ln1`, `ln2`), x is the stream.

Without norms behind halves the last product of a half adds to the stream itself, unless it cannot
(`BlockLinear.accepts_addend`); that half has no branch then. Else the addition happens inside a
norm, so that what a half puts out stays beside the stream until the next half (or the head) begins.
A norm behind the half needs it in backward, so that it is kept.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from llmq.arch.model_config import ModelConfig
from llmq.base.operand import Operand, OutputForms
from llmq.base.tensor import Tensor
from llmq.formats.format import Format
from llmq.model.activations import NormTensors
from llmq.model.norm import Normalization
from llmq.model.parameters import BlockGrads, BlockWeights
from llmq.ops.add import add
from llmq.runtime.device import Device


class BlockNorms:
    """The norms of all halves of all blocks."""

    def __init__(self, dev: Device, config: ModelConfig, operands: Format):
        self.norm, self.operands = Normalization(dev, config), operands
        self.pre, self.post = config.arch.pre_norm, config.arch.post_norm

    def forward(
        self, temps: ExitStack, here: NormTensors, before: Tensor | None, w: BlockWeights
    ) -> Operand:
        """The input of a half.

        before: (rows, C), the stream where the half before began; None: there is none. It is not
        read where there is no branch.
        """
        if self.pre:
            return self.operands.input(temps, here.out, partial(self._run, here, before, w))
        tensor_id, stream, measured = here.out.tensor_id, here.stream, before is not None
        if measured:
            self._run(here, before, w, self.operands.measured(tensor_id, stream))
        return self.operands.of_tensor(
            temps, tensor_id, stream, measured=measured, transposed=False
        )

    def recompute(
        self,
        temps: ExitStack,
        here: NormTensors,
        before: Tensor | None,
        w: BlockWeights,
        *,
        product: bool,
    ) -> Operand:
        """The input of a half in backward. before: None unless the stream is made again, too.

        product: so is the half's first product, and not only its weight's gradient needs the input.
        """
        if not self.pre:
            if before is not None:
                self._run(here, before, w, OutputForms(here.stream))
            return self.operands.of_tensor_again(
                temps, here.out.tensor_id, here.stream, product=product
            )
        kept = self.operands.kept(here.out)
        if kept is not None:
            return kept
        write = partial(self._run, here, before, w)
        return self.operands.input_again(temps, here.out, write, product=product)

    def _run(
        self, here: NormTensors, before: Tensor | None, w: BlockWeights, to: OutputForms
    ) -> None:
        """The stream if `before` and a branch are given, and the half's input; without a norm of
        its own, the stream is that."""
        stream, (weight, bias) = here.stream, here.parameters(w)
        if here.branch is None:
            before = None
        if self.post and before is not None:
            into = OutputForms(stream) if self.pre else to
            self.norm.post(into, here.post_stats, here.branch, before, here.post_weight(w))
            before = None
        if not self.pre:
            return
        if before is None:
            self.norm.forward(to, here.stats, stream, weight, bias)
        else:
            self.norm.forward_residual(stream, to, here.stats, before, here.branch, weight, bias)

    def d_out(self, d_residual: Tensor, d_x: Tensor) -> Tensor:
        """The place where `backward` leaves the gradient of the output of the half before."""
        return d_x if self.post else d_residual

    def backward(
        self,
        here: NormTensors,
        id_before: str | None,
        d_residual: Tensor,
        d_x: Tensor,
        w: BlockWeights,
        g: BlockGrads,
    ) -> None:
        """d_residual (rows, C), the gradient of the stream behind the half, to that in front of it.

        d_x (rows, C): the gradient of the half's input. `d_out` then is the gradient of what the
        half before has put out; id_before is its name, None where there is no half.
        """
        d_branch = OutputForms(d_residual)
        if id_before is not None:
            out = self.d_out(d_residual, d_x)
            d_branch = self.operands.measured(id_before, out)
        if self.pre:
            to = OutputForms(d_residual) if self.post else d_branch
            (weight, _), grads = here.parameters(w), here.parameters(g)
            self.norm.backward(to, *grads, d_x, here.stream, weight, here.stats, d_residual)
        else:
            add(self.norm.dev, d_residual, d_residual, d_x)
        if self.post and id_before is not None:
            weight, d_weight = here.post_weight(w), here.post_weight(g)
            args = (here.branch, weight, here.post_stats, None)
            self.norm.backward(d_branch, d_weight, None, d_residual, *args)
