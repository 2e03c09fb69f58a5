"""Norms of a block, before or after each half, or both; a half is attention, an MLP or the like.

    stream = before + branch        branch: the output of the preceding half
    x = norm(stream)                the input of the half, whose output is the next branch

With norms after halves (`ln1_post`, `ln2_post`), stream = before + norm(branch). Without norms
before halves (no `ln1`, `ln2`), x = stream.

If no norm follows a half, and the half's last product takes an addend
(`BlockLinear.accepts_addend`), the epilogue of the product adds to the stream, and the half has no
branch. In all other cases the next norm adds the branch, which lives until that norm, or, with a
norm after the half, until backward. `Normalization` computes RMSNorm and LayerNorm; only LayerNorm
has means and biases.
"""

from __future__ import annotations

from contextlib import ExitStack

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32
from llmq.base.operand import Fp8Out, Operand, OutBuffers
from llmq.base.tensor import Accumulator, Tensor
from llmq.formats.operands import Operands
from llmq.model.activations import LayerContext, NormTensors, Stats
from llmq.model.parameters import PartGrads, PartWeights
from llmq.ops.pointwise import norm
from llmq.ops.pointwise.elementwise import add, scale
from llmq.ops.quantize import quantize
from llmq.runtime.device import Device


def alloc_stats(dev: Device, config: ModelConfig, name: str, rows: int) -> Stats:
    """Allocate the statistics of one norm, which are kept from forward to backward."""
    rstd = dev.alloc(f"{name}_rstd", (rows,), F32, "Activations")
    if config.norm == "rmsnorm":
        return Stats(rstd, None)
    return Stats(rstd, dev.alloc(f"{name}_mean", (rows,), F32, "Activations"))


class Normalization:
    """Launches kernels of the model's kind of norm, RMSNorm or LayerNorm. eps None: the epsilon of
    the model's config."""

    def __init__(self, dev: Device, config: ModelConfig, eps: float | None = None):
        self.dev, self.eps = dev, config.norm_eps if eps is None else eps
        self.offset = config.arch.norm_offset
        self.once = config.arch.norm_once

    def forward(
        self,
        to: OutBuffers,
        stats: Stats,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *added: Tensor,
    ) -> None:
        """Compute norm(x) into `to`, (rows, C). added: nothing, or two tensors whose sum is first
        written to x."""
        dev, (rstd, mean) = self.dev, stats
        with ExitStack() as temps:
            fp8 = _by_row(dev, temps, to, x.shape)
            if added:
                norm.forward_residual(
                    dev, x, to.tensor, mean, rstd, *added, weight, bias, self.eps,
                    offset=self.offset, once=self.once, abs_max=to.abs_max, fp8=fp8,
                )  # fmt: skip
            else:
                norm.forward(
                    dev, to.tensor, mean, rstd, x, weight, bias, self.eps,
                    offset=self.offset, once=self.once, abs_max=to.abs_max, fp8=fp8,
                )  # fmt: skip
            if fp8 is not to.fp8:
                quantize.transpose(dev, to.fp8.transposed, fp8.codes)

    def post(
        self, to: OutBuffers, stats: Stats, x: Tensor, residual: Tensor | None, weight: Tensor
    ) -> None:
        """Compute residual + norm(x), or norm(x) without a residual, into `to` (rows, C), rounded
        as Architecture.post_norm says. The gradient of x is computed by `backward` without
        d_residual."""
        with ExitStack() as temps:
            fp8 = _by_row(self.dev, temps, to, x.shape)
            norm.post(
                self.dev, to.tensor, stats.rstd, x, residual, weight, self.eps,
                offset=self.offset, abs_max=to.abs_max, fp8=fp8,
            )  # fmt: skip
            if fp8 is not to.fp8:
                quantize.transpose(self.dev, to.fp8.transposed, fp8.codes)

    def scale(self, x: Tensor, by: Tensor | None, gradient: Accumulator | None = None) -> None:
        """Multiply x (rows, C) by `by` (1,), unless `by` is None. gradient: the gradient of `by`,
        set to zero, because `by` is not trained."""
        if by is not None:
            scale(self.dev, x, x, by)
        if gradient is not None and not gradient.accumulate:
            self.dev.zero(gradient.tensor)

    def backward(
        self,
        to: OutBuffers,
        d_weight: Accumulator | None,
        d_bias: Accumulator | None,
        d_out: Tensor,
        x: Tensor,
        weight: Tensor,
        stats: Stats,
        d_residual: Tensor | None,
    ) -> None:
        """Compute the gradient of the norm's input, plus d_residual, into `to` (rows, C);
        d_residual may be to.tensor. d_weight, d_bias: None if the gradient is not wanted."""
        dev, (rstd, mean) = self.dev, stats
        with ExitStack() as temps:
            fp8 = _by_row(dev, temps, to, x.shape)
            norm.backward(
                dev, to.tensor, d_weight, d_bias, d_out, x, weight, mean, rstd, d_residual,
                offset=self.offset, abs_max=to.abs_max, fp8=fp8,
            )  # fmt: skip
            if fp8 is not to.fp8:
                quantize.transpose(dev, to.fp8.transposed, fp8.codes)


def _by_row(dev: Device, temps: ExitStack, to: OutBuffers, shape: tuple[int, ...]) -> Fp8Out | None:
    """Return the codes that a norm's kernel writes, row by row. Transposed codes (features, rows)
    are made from these codes, which are scratch of `temps` if no product reads them."""
    if to.fp8 is None or to.fp8.transposed is None:
        return to.fp8
    codes = to.fp8.codes
    if codes is None:
        scratch = dev.scratch("norm_codes", shape, to.fp8.transposed.dtype)
        codes = temps.enter_context(scratch)
    return to.fp8._replace(codes=codes, transposed=None)


class BlockNorms:
    """The norms before and after the halves of all blocks."""

    def __init__(self, dev: Device, config: ModelConfig, operands: Operands):
        self.norm, self.operands = Normalization(dev, config), operands
        self.post = config.arch.post_norm

    def forward(
        self, temps: ExitStack, site: NormTensors, before: Tensor | None, w: PartWeights
    ) -> Operand:
        """Compute the input of a half from the stream, and return it as an operand. before: (rows,
        C), stream before the preceding half, read if that half has a branch; None if no half
        precedes."""
        if site.stats is not None:
            out = self.operands.buffers(temps, site.out)
            self._run(site, before, w, out)
            return self.operands.finalize(temps, out)
        tensor_id, stream, measured = site.out.tensor_id, site.stream, before is not None
        if measured:
            self._run(site, before, w, self.operands.measured(tensor_id, stream))
        return self.operands.quantize(temps, tensor_id, stream, measured=measured, transposed=False)

    def recompute(self, ctx: LayerContext, *, product: bool) -> Operand:
        """Return the input of a half in backward. ctx.before: None unless the stream is recomputed,
        too. product: True if the first product of the half is recomputed; False if only the
        weight's gradient reads the input."""
        site, before, w = ctx.layer.norm, ctx.before, ctx.w
        if site.stats is None:
            if before is not None:
                self._run(site, before, w, OutBuffers("", site.stream))
            return self.operands.quantize_again(
                ctx.temps, site.out.tensor_id, site.stream, product=product
            )
        kept = self.operands.kept(site.out)
        if kept is not None:
            return kept
        out = self.operands.buffers_again(ctx.temps, site.out, product=product)
        self._run(site, before, w, out)
        return self.operands.finalize(ctx.temps, out)

    def _run(
        self, site: NormTensors, before: Tensor | None, w: PartWeights, to: OutBuffers
    ) -> None:
        """Write the half's input to `to`, and, if `before` and a branch are given, the stream.
        Without a norm before the half, the stream is the input."""
        stream, (weight, bias) = site.stream, site.parameters(w)
        if site.branch is None:
            before = None
        if self.post and before is not None:
            into = to if site.stats is None else OutBuffers("", stream)
            self.norm.post(into, site.post_stats, site.branch, before, site.post_weight(w))
            self.norm.scale(stream, site.scale(w))
            before = None
        if site.stats is None:
            return
        added = () if before is None else (before, site.branch)
        self.norm.forward(to, site.stats, stream, weight, bias, *added)

    def d_out(self, d_residual: Tensor, d_x: Tensor) -> Tensor:
        """Return the tensor in which `backward` leaves the gradient of the preceding half's
        output."""
        return d_x if self.post else d_residual

    def backward(
        self,
        site: NormTensors,
        id_before: str | None,
        d_residual: Tensor,
        d_x: Tensor,
        w: PartWeights,
        g: PartGrads,
    ) -> None:
        """Change d_residual (rows, C) from the gradient of the stream after the half to the
        gradient of the stream before the half. d_x (rows, C): gradient of the half's input. After
        the call, `d_out` is the gradient of the preceding half's output. id_before: the name of
        that gradient; None if no half precedes."""
        d_branch = OutBuffers("", d_residual)
        if id_before is not None:
            out = self.d_out(d_residual, d_x)
            d_branch = self.operands.measured(id_before, out)
        if site.stats is not None:
            to = OutBuffers("", d_residual) if self.post else d_branch
            (weight, _), grads = site.parameters(w), site.parameters(g)
            self.norm.backward(to, *grads, d_x, site.stream, weight, site.stats, d_residual)
        else:
            add(self.norm.dev, d_residual, d_residual, d_x)
        if self.post and id_before is not None:
            self.norm.scale(d_residual, site.scale(w), site.scale(g))
            weight, d_weight = site.post_weight(w), site.post_weight(g)
            args = (site.branch, weight, site.post_stats, None)
            self.norm.backward(d_branch, d_weight, None, d_residual, *args)
