"""The end of the model: final norm, LM head in chunks, fused cross-entropy, first gradients.

In fp8 cross-entropy writes the gradient of the logits as E5M2 codes, whatever format the blocks'
gradients have: most probabilities of a large vocabulary are below what E4M3 can tell from 0 beside
the target's -1. Its elements are bounded, so the scale is a constant.

Where `matmul_exp` serves, on Hopper, the product of logits leaves their exponentials, which are the
gradient but for a factor of each row; the products that use it have their rows multiplied instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E5M2, E5M2_MAX, F32
from llmq.base.operand import Fp8, Operand, Target
from llmq.base.tensor import Tensor
from llmq.model.linear import FAST, Linear
from llmq.model.norm import Normalization, alloc_stats
from llmq.model.operands import HEAD, Operands
from llmq.model.parameters import HeadGrads, HeadWeights
from llmq.ops import cross_entropy, exp_rows, matmul_exp, quantize
from llmq.ops.common import num_sums
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device

LARGEST_LSE = 64.0  # of logits, for the bound of their gradient with a z-loss


def gradient_scale(z_loss: float) -> float:
    """Of E5M2 codes of d_logits, which are at most 1 + z_loss * lse: a power of two."""
    return 2.0 ** math.ceil(math.log2((1 + z_loss * LARGEST_LSE) / E5M2_MAX))


class _Gradient(NamedTuple):
    """The gradient of logits (rows, Vp): the rows of `values` times `factors`, F32 (rows,), or 1.

    Where there are factors, the input's rows have been multiplied by them, too, for the gradient of
    the weight.
    """

    values: Operand
    factors: Tensor | None = None


class _Chunk(NamedTuple):
    """Rows start to stop: x (rows, C), the final norm's output, and targets (rows,)."""

    start: int
    stop: int
    x: Operand
    targets: Tensor


class Head:
    """Buffers of the head, for as many rows (B*T tokens) and in the format of the operands.

    losses, lse: F32 (rows,), per token, of the last micro-step. The logits of rows/chunks tokens
    exist at a time, with chunks as --lmhead-chunks says.
    """

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        operands: Operands,
        options: TrainConfig,
        residual: Tensor,
    ):
        """residual: (rows, C), the stream behind the last block."""
        shape, dtype, z_loss = operands.shape, operands.dtype, options.z_loss
        rows = shape[0]
        self.dev, self.config, self.dtype, self.rows = dev, config, dtype, rows
        self.chunks, self.z_loss = options.lmhead_chunks, z_loss
        self.norm = Normalization(dev, config)
        self.residual = residual
        self.out = dev.alloc("norm.final", shape, dtype, "Activations")
        self.stats = alloc_stats(dev, config, "norm.final", rows)
        if config.arch.post_norm:
            self.branch_stats = alloc_stats(dev, config, "branch.final", rows)
        self.losses = dev.alloc("losses", (rows,), F32, "Activations")
        self.lse = dev.alloc("logits_lse", (rows,), F32, "Activations")
        self.fp8 = options.head_dtype == "e4m3"
        self.operands = operands if self.fp8 else Operands(dev, shape, dtype)
        self.linear = Linear(dev, FAST[options.fp8_fast_accumulation].head)
        if self.fp8:
            self.gradient_scale = dev.alloc("d_logits.scale", (1,), F32, "Activations")
            dev.upload(self.gradient_scale, np.array([gradient_scale(z_loss)], np.float32))

    def forward(self, w: HeadWeights, residual_att: Tensor, branch: Tensor | None) -> None:
        """The final norm, of the last block's residual_att + branch, both (rows, C).

        branch: None where the last block has written the sum itself.
        """
        to, residual, stats = self.operands.measured(HEAD, self.out), self.residual, self.stats
        if self.config.arch.post_norm:
            self.norm.post(Target(residual), self.branch_stats, branch, residual_att, w.ln1_post)
            self.norm.post(to, stats, residual, None, w.norm)
        elif branch is None:
            self.norm.forward(to, stats, residual, w.norm, w.norm_bias)
        else:
            self.norm.forward_residual(
                residual, to, stats, residual_att, branch, w.norm, w.norm_bias
            )

    def loss(self, lm_head: Operand, targets: Tensor) -> None:
        """Per-token losses only. lm_head: (Vp, C). targets: I32 (rows,), -100 where masked."""
        for start, stop in self._chunks():
            with ExitStack() as temps:
                x = self._input(temps, start, stop, transposed=False)
                with self._logits(start, stop, x, lm_head) as logits:
                    cross_entropy.forward(
                        self.dev,
                        self.losses.rows(start, stop),
                        self.lse.rows(start, stop),
                        logits,
                        targets.rows(start, stop),
                        self.config.vocab_size,
                    )

    def logits_of(self, lm_head: Operand, rows: Sequence[int]) -> np.ndarray:
        """F32 (len(rows), V) of these rows, which rise, after `loss`; waits for the device.

        Their chunks' products are made once more, so that nothing needs memory of its own.
        """
        found = [np.zeros((0, self.config.padded_vocab), np.float32)]
        for start, stop in self._chunks():
            inside = [row - start for row in rows if start <= row < stop]
            if not inside:
                continue
            with ExitStack() as temps:
                x = self._input(temps, start, stop, transposed=False)
                with self._logits(start, stop, x, lm_head) as logits:
                    found += [self.dev.download(logits.rows(r, r + 1)) for r in inside]
        return np.concatenate(found, dtype=np.float32)[:, : self.config.vocab_size]

    def loss_and_backward(
        self,
        w: HeadWeights,
        g: HeadGrads,
        targets: Tensor,
        branch: Tensor | None,
        to: Target,
        d_residual: Tensor,
        d_norm: Tensor,
    ) -> None:
        """Per-token losses, the head's gradients, and d_residual (rows, C) behind the last block.

        branch: as in forward. to: the branch's gradient, in d_residual or, with post_norm, d_norm,
        which is scratch before. The loss is the sum over tokens; nothing is divided here.
        """
        d_weight, trained = g.lm_head, g.lm_head is not None
        for start, stop in self._chunks():
            with ExitStack() as temps:
                x = self._input(temps, start, stop, transposed=trained)
                chunk = _Chunk(start, stop, x, targets.rows(start, stop))
                if self.fp8:
                    way = self._d_logits_fp8
                elif matmul_exp.serves(self.dev, x, w.lm_head.shape[0]):
                    way = self._exponentials
                else:
                    way = self._d_logits
                gradient = temps.enter_context(way(chunk, w.lm_head, trained=trained))
                d_x = d_norm.rows(start, stop)
                self.linear.input_gradient(d_x, gradient.values, w.lm_head)
                if gradient.factors is not None:
                    exp_rows.scale(self.dev, d_x, gradient.factors)
                self.linear.weight_gradients(d_weight, None, gradient.values, x)
            if d_weight is not None:
                d_weight = d_weight._replace(accumulate=True)
        x, stats, post = self.residual, self.stats, self.config.arch.post_norm
        stream = Target(d_residual) if post else to
        self.norm.backward(stream, g.norm, g.norm_bias, d_norm, x, w.norm, stats, None)
        if post:
            stats = self.branch_stats
            weight, d_weight = w.ln1_post, g.ln1_post
            self.norm.backward(to, d_weight, None, d_residual, branch, weight, stats, None)

    @contextmanager
    def _d_logits(self, chunk: _Chunk, lm_head: Operand, *, trained: bool) -> Iterator[_Gradient]:
        with self._logits(chunk.start, chunk.stop, chunk.x, lm_head) as logits:
            self._cross_entropy(chunk, logits)
            yield _Gradient(logits)

    @contextmanager
    def _exponentials(
        self, chunk: _Chunk, lm_head: Tensor, *, trained: bool
    ) -> Iterator[_Gradient]:
        """trained: the matrix, for whose gradient x is multiplied by the factors in place: nobody
        reads it after the head."""
        start, stop, x, targets = chunk
        dev, (rows, vocab) = self.dev, (stop - start, lm_head.shape[0])
        losses, lse = self.losses.rows(start, stop), self.lse.rows(start, stop)
        size = self.config.vocab_size
        with ExitStack() as temps:
            e = temps.enter_context(dev.scratch("logits", (rows, vocab), self.dtype))
            factors = temps.enter_context(dev.scratch("logits.factors", (rows,), F32))
            with ExitStack() as inner:
                shape = (num_sums(vocab), rows)
                sums = inner.enter_context(dev.scratch("logits.sums", shape, F32))
                shift = inner.enter_context(dev.scratch("logits.shift", (rows,), F32))
                picked = inner.enter_context(dev.scratch("logits.targets", (rows,), F32))
                exp_rows.shift(dev, shift, x, lm_head, targets)
                matmul_exp.forward(dev, e, sums, picked, x, lm_head, shift, targets, size)
                exp_rows.finish(
                    dev, e, x, losses, lse, factors, sums, shift, picked, lm_head, targets,
                    size, self.z_loss, scale_x=trained,
                )  # fmt: skip
            yield _Gradient(e, factors)

    @contextmanager
    def _d_logits_fp8(
        self, chunk: _Chunk, lm_head: Operand, *, trained: bool
    ) -> Iterator[_Gradient]:
        """The transposed codes take the place of the logits, which are twice as large.

        trained: the matrix, whose gradient alone needs transposed codes.
        """
        start, stop, x, _ = chunk
        shape, scale = (stop - start, lm_head.codes.shape[0]), self.gradient_scale
        with self.dev.scratch("d_logits.q", shape, E5M2) as codes:
            with self._logits(start, stop, x, lm_head) as logits:
                self._cross_entropy(chunk, logits, codes)
            if not trained:
                yield _Gradient(Fp8(source=None, codes=codes, transposed=None, scale=scale))
                return
            with self.dev.scratch("d_logits.q_t", shape[::-1], E5M2) as transposed:
                quantize.transpose(self.dev, transposed, codes)
                values = Fp8(source=None, codes=codes, transposed=transposed, scale=scale)
                yield _Gradient(values)

    def _cross_entropy(self, chunk: _Chunk, logits: Tensor, codes: Tensor | None = None) -> None:
        """Losses; and the gradient in place of the logits, or as codes."""
        start, stop, _, targets = chunk
        cross_entropy.forward_backward(
            self.dev,
            logits,
            self.losses.rows(start, stop),
            self.lse.rows(start, stop),
            targets,
            self.config.vocab_size,
            self.z_loss,
            codes=codes,
            code_scale=gradient_scale(self.z_loss),
        )

    def _chunks(self) -> list[tuple[int, int]]:
        size = self.rows // self.chunks
        return [(start, start + size) for start in range(0, self.rows, size)]

    def _input(self, temps: ExitStack, start: int, stop: int, *, transposed: bool) -> Operand:
        """The final norm's output for a chunk, as the head's products take it."""
        x = self.out.rows(start, stop)
        return self.operands.of_tensor(temps, HEAD, x, measured=True, transposed=transposed)

    @contextmanager
    def _logits(self, start: int, stop: int, x: Operand, lm_head: Operand) -> Iterator[Tensor]:
        matrix = lm_head.codes if self.fp8 else lm_head
        shape = (stop - start, matrix.shape[0])
        with self.dev.scratch("logits", shape, self.dtype) as logits:
            self.linear.forward(logits, x, lm_head)
            yield logits
