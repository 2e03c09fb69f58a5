"""The end of the model: final norm, LM head in chunks of rows, fused cross-entropy, and their
gradients.

With an fp8 head, cross-entropy writes the gradient of the logits as E5M2 codes, because most
probabilities of a large vocabulary would be 0 in E4M3 beside the target's -1. The gradient's
elements are bounded, so the scale is a constant.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E5M2, E5M2_MAX, F32, I32
from llmq.base.operand import Fp8, Operand, OutBuffers, turned
from llmq.base.tensor import Accumulator, Tensor
from llmq.formats.operands import HEAD, Operands
from llmq.model.adapters import Dropout, HeadAdapters, OfPass, table_adapters
from llmq.model.linear import Linear
from llmq.model.norms import Normalization, alloc_stats
from llmq.model.parameters import PartGrads, PartWeights
from llmq.ops.common import LogitRows, padded_columns
from llmq.ops.loss import cross_entropy
from llmq.ops.loss.distill import Teacher, top_k
from llmq.ops.loss.labels import Labels
from llmq.ops.quantize import quantize, quantize_int8
from llmq.options.groups.model import ModelOptions
from llmq.options.options import StepOptions
from llmq.runtime.device import Device

LARGEST_LSE = 64.0  # assumed bound of the log-sum-exp, to bound z-loss gradients


def gradient_scale(z_loss: float, weight: float = 1.0) -> float:
    """Return the scale of d_logits' E5M2 codes, a power of two. An element of |d_logits| is at most
    weight * (1 + z_loss * lse)."""
    return 2.0 ** math.ceil(math.log2(weight * (1 + z_loss * LARGEST_LSE) / E5M2_MAX))


def _columns_of_new_rows(dev: Device, config: ModelConfig, options: ModelOptions) -> Tensor | None:
    """Return the columns of new tokens in the logits, I32 (R,), padded with -1; None unless only
    new tokens' rows of the matrix are trained."""
    if not options.trains_new_rows or not (config.tied_embeddings or "new-rows" in options.train):
        return None
    ids = np.arange(*config.new_tokens, dtype=np.int32)
    padded = np.full(padded_columns(ids.size, 1), -1, np.int32)
    padded[: ids.size] = ids
    return dev.constant("new_rows.columns", padded, I32, "Activations")


class _Chunk(NamedTuple):
    """The chunk of rows [start, stop) in a pass of the LM head. x: output of the final norm for
    these rows. lm_head: the matrix (Vp, C). low: tensors of the adapters in this pass. temps: the
    stack of the chunk's scratch."""

    start: int
    stop: int
    x: Operand
    lm_head: Operand
    low: OfPass | None
    temps: ExitStack

    def of(self, tensor: Tensor | None) -> Tensor | None:
        return tensor and tensor.rows(self.start, self.stop)


class Head:
    """Final norm, LM head and cross-entropy of a micro-batch with rows = B*T tokens. losses, lse:
    F32 (rows,), the loss and the log-sum-exp of logits for each token of the last micro-step. Only
    the logits of rows / --lmhead-chunks tokens are in memory at a time."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        operands: Operands,
        options: StepOptions,
        residual: Tensor,
        largest: float = 1.0,
        dropout: Dropout | None = None,
    ):
        """residual: (rows, C), residual stream after the last block. largest: the largest absolute
        weight of a row. dropout: the dropout of the adapters' inputs."""
        shape, dtype, z_loss = operands.shape, operands.dtype, options.optim.z_loss
        rows = shape[0]
        self.dev, self.config, self.dtype, self.rows = dev, config, dtype, rows
        self.chunks, self.z_loss = options.memory.lmhead_chunks, z_loss
        self.softcap = None if config.num_labels else config.logit_softcap
        self.norm = Normalization(dev, config)
        self.residual = residual
        self.out = dev.alloc("norm.final", shape, dtype, "Activations")
        self.stats = alloc_stats(dev, config, "norm.final", rows)
        if config.arch.post_norm:
            self.branch_stats = alloc_stats(dev, config, "branch.final", rows)
        self.losses = dev.alloc("losses", (rows,), F32, "Activations")
        self.lse = dev.alloc("logits_lse", (rows,), F32, "Activations")
        self.new_columns = _columns_of_new_rows(dev, config, options.model)
        table = table_adapters(config, options.model, "head")
        alpha = 1.0 if config.num_labels else 1 / config.logits_scaling
        self.adapters = None if table is None else HeadAdapters(dev, table.times(alpha), dropout)
        self.operands = operands.head
        self.fp8 = self.operands.makes_codes
        self.linear = Linear(dev, self.operands, alpha)
        self._code_scale = 1.0
        if self.fp8:
            self._code_scale = gradient_scale(z_loss, largest)
            scale = np.array([self._code_scale], np.float32)
            self.gradient_scale = dev.constant("d_logits.scale", scale, F32, "Activations")

    def forward(self, w: PartWeights, residual_att: Tensor, branch: Tensor | None) -> None:
        """Apply the final norm to residual_att + branch from the last block, both (rows, C).
        branch: None if the last block has added the branch to residual_att."""
        to, residual, stats = self.operands.measured(HEAD, self.out), self.residual, self.stats
        if self.config.arch.post_norm:
            stream, weight = OutBuffers("", residual), w["ln1_post"]
            self.norm.post(stream, self.branch_stats, branch, residual_att, weight)
            self.norm.scale(residual, w.get("ln1_scale"))
            self.norm.post(to, stats, residual, None, w["norm"])
            return
        added = () if branch is None else (residual_att, branch)
        self.norm.forward(to, stats, residual, w["norm"], w.bias("norm"), *added)

    def token_losses(
        self, w: PartWeights, targets: Tensor, of_rows: Teacher | Labels | None = None
    ) -> None:
        """Compute the loss of each token, without gradients. targets: I32 (rows,), -100 for masked
        tokens. of_rows: the result of Loss.of_rows."""
        with ExitStack() as temps:
            low = self._begin_adapters(temps, w)
            for chunk in self._parts(w, low):
                logits = self._logits(chunk, chunk.temps)
                self._lose(chunk, logits, targets, None, of_rows, gradient=False)

    def top_k(self, w: PartWeights, top: Tensor) -> None:
        """Write the k largest logits of each row to top, F32 (rows, 2 k), in the format of
        ops.loss.distill.top_k. Call token_losses before this method, which reads `lse`."""
        with ExitStack() as temps:
            low = self._begin_adapters(temps, w)
            for chunk in self._parts(w, low):
                logits = self._logits(chunk, chunk.temps)
                top_k(self.dev, chunk.of(top), logits, chunk.of(self.lse), self.config.outputs)

    def _parts(
        self, w: PartWeights, low: OfPass | None, *, transposed: bool = False
    ) -> Iterator[_Chunk]:
        """Yield the chunks of a pass, one after another. low: the result of _begin_adapters."""
        for start, stop in self.dev.alike(self._spans()):
            with ExitStack() as temps:
                yield self._chunk(temps, start, stop, w, low, transposed=transposed)

    def _begin_adapters(
        self, temps: ExitStack, w: PartWeights, g: PartGrads | None = None
    ) -> OfPass | None:
        """Return the tensors of the adapters for a pass over all rows; None without adapters."""
        return None if self.adapters is None else self.adapters.begin(temps, self.out, w, g)

    def _lose(
        self,
        chunk: _Chunk,
        logits: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        of_rows: Teacher | Labels | None,
        codes: Tensor | None = None,
        *,
        gradient: bool = True,
    ) -> None:
        """Compute the losses of a chunk's rows. gradient: True if the losses' gradient overwrites
        the logits, or is written to `codes` if given."""
        losses, lse, targets, weights = map(chunk.of, (self.losses, self.lse, targets, weights))
        dev, outputs = self.dev, self.config.outputs
        if of_rows is not None:
            rows = LogitRows(logits, losses, lse, targets, weights, outputs)
            of_rows.rows(chunk.start, chunk.stop).launch(dev, rows, gradient=gradient)
        elif not gradient:
            cross_entropy.forward(dev, losses, lse, logits, targets, outputs, softcap=self.softcap)
        else:
            cross_entropy.forward_backward(
                dev, logits, losses, lse, targets, outputs, self.z_loss, codes=codes,
                code_scale=self._code_scale, weights=weights, softcap=self.softcap,
            )  # fmt: skip

    @contextmanager
    def logits(self, w: PartWeights) -> Iterator[Tensor]:
        """Yield the logits (rows, Vp), in scratch, of one chunk of rows after another; call
        `forward` before this method."""
        with ExitStack() as temps:
            low = self._begin_adapters(temps, w)
            chunk = self._chunk(temps, 0, self.rows, w, low, transposed=False)
            yield self._logits(chunk, temps)

    def loss_and_backward(
        self,
        w: PartWeights,
        g: PartGrads,
        targets: Tensor,
        weights: Tensor | None,
        branch: Tensor | None,
        to: OutBuffers,
        d_residual: Tensor,
        d_norm: Tensor,
        of_rows: Teacher | Labels | None = None,
    ) -> None:
        """Compute the loss of each token, the head's gradients, and d_residual (rows, C), the
        gradient of the residual stream after the last block. weights: F32 (rows,), factors of the
        rows' gradients; None if all factors are 1. branch: output of the last block's last half, as
        in forward. to: buffers of the branch's gradient: in d_residual, or with post_norm in
        d_norm, whose memory is scratch until this gradient is written. of_rows: the result of
        Loss.of_rows. All gradients are sums over rows, not means."""
        lm_head, d_weight, d_rows = w["lm_head"], g.get("lm_head"), g.get("new_rows")
        trained = d_weight is not None or d_rows is not None
        with ExitStack() as temps:
            low = self._begin_adapters(temps, w, g)
            for chunk in self._parts(w, low, transposed=trained):
                codes, coded = None, self.fp8 and of_rows is None
                if coded:
                    scratch = self.dev.scratch("d_logits.q", self._shape(chunk), E5M2)
                    codes = chunk.temps.enter_context(scratch)
                with ExitStack() if coded else nullcontext(chunk.temps) as inner:
                    gradient = self._logits(chunk, inner)
                    self._lose(chunk, gradient, targets, weights, of_rows, codes)
                if coded:
                    gradient = self._fp8_gradient(chunk, codes, transposed=trained)
                self.linear.input_gradient(chunk.of(d_norm), gradient, lm_head)
                self.linear.weight_gradients(d_weight, None, gradient, chunk.x)
                if d_rows is not None:
                    self._rows_gradient(d_rows, gradient, chunk.x)
                if low is not None:
                    low.of_logits(chunk.start, chunk.stop, gradient)
                d_weight, d_rows = (g and g._replace(accumulate=True) for g in (d_weight, d_rows))
            if low is not None:
                self.adapters.finish(low, self.out, w, g, d_norm)
        x, stats, post = self.residual, self.stats, self.config.arch.post_norm
        stream = OutBuffers("", d_residual) if post else to
        grads, weight = (g.get("norm"), g.bias("norm")), w["norm"]
        self.norm.backward(stream, *grads, d_norm, x, weight, stats, None)
        if post:
            self.norm.scale(d_residual, w.get("ln1_scale"), g.get("ln1_scale"))
            grads, weight, stats = (g.get("ln1_post"), None), w["ln1_post"], self.branch_stats
            self.norm.backward(to, *grads, d_residual, branch, weight, stats, None)

    def _rows_gradient(self, d_rows: Accumulator, gradient: Tensor, x: Tensor) -> None:
        """Compute d_rows, the gradient of the matrix's rows for new tokens, from these tokens'
        columns of the logits' gradient."""
        shape = (gradient.shape[0], self.new_columns.size)
        with self.dev.scratch("d_logits.new", shape, self.dtype) as columns:
            quantize_int8.take_outliers(self.dev, columns, gradient, self.new_columns)
            self.linear.weight_gradients(d_rows, None, columns, x)

    def _fp8_gradient(self, chunk: _Chunk, codes: Tensor, *, transposed: bool) -> Fp8:
        """Return the gradient of the logits as E5M2 codes. Only the gradient of the matrix needs
        transposed codes, which reuse the memory of the logits."""
        by_columns = None
        if transposed:
            scratch = self.dev.scratch("d_logits.q_t", turned(codes.shape), E5M2)
            by_columns = chunk.temps.enter_context(scratch)
            quantize.transpose(self.dev, by_columns, codes)
        return Fp8(source=None, codes=codes, transposed=by_columns, scale=self.gradient_scale)

    def _spans(self) -> list[tuple[int, int]]:
        size = self.rows // self.chunks
        return [(start, start + size) for start in range(0, self.rows, size)]

    def _chunk(
        self,
        temps: ExitStack,
        start: int,
        stop: int,
        w: PartWeights,
        low: OfPass | None,
        *,
        transposed: bool,
    ) -> _Chunk:
        """Return the chunk of rows [start, stop), with the final norm's output as an operand of
        products."""
        x = self.out.rows(start, stop)
        operand = self.operands.quantize(temps, HEAD, x, measured=True, transposed=transposed)
        return _Chunk(start, stop, operand, w["lm_head"], low, temps)

    def _shape(self, chunk: _Chunk) -> tuple[int, int]:
        matrix = chunk.lm_head.codes if self.fp8 else chunk.lm_head
        return chunk.stop - chunk.start, matrix.shape[0]

    def _logits(self, chunk: _Chunk, temps: ExitStack) -> Tensor:
        """Return the logits (rows, Vp) of a chunk, as scratch of `temps`."""
        logits = temps.enter_context(self.dev.scratch("logits", self._shape(chunk), self.dtype))
        adapters = None if chunk.low is None else chunk.low.beside(chunk.start, chunk.stop)
        self.linear.forward(logits, chunk.x, chunk.lm_head, adapters=adapters)
        return logits
