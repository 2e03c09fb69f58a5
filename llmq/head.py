"""The end of the model: final norm, LM head in chunks, fused cross-entropy, first gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmq import linear, norm
from llmq.block import Layer
from llmq.config import ModelConfig
from llmq.dtypes import F32, DType
from llmq.ops import cross_entropy
from llmq.ops.matmul import matmul
from llmq.runtime.device import Device
from llmq.runtime.tensor import Accumulator, Tensor


class Head:
    """Buffers of the head for B*T = rows tokens.

    losses, lse: F32 (rows,), per token, of the last micro-step. chunks: the logits of rows/chunks
    tokens exist at a time.
    """

    def __init__(self, dev: Device, config: ModelConfig, dtype: DType, rows: int, chunks: int):
        self.dev, self.config, self.dtype, self.rows, self.chunks = dev, config, dtype, rows, chunks
        shape = (rows, config.hidden_size)
        self.residual = dev.alloc("residual.final", shape, dtype, "Activations")
        self.out = dev.alloc("norm.final", shape, dtype, "Activations")
        self.stats = norm.alloc_stats(dev, config, "norm.final", rows)
        self.losses = dev.alloc("losses", (rows,), F32, "Activations")
        self.lse = dev.alloc("logits_lse", (rows,), F32, "Activations")

    def forward(self, w: dict[str, Tensor], last: Layer, branch: Tensor) -> None:
        """The final norm, of the last block's residual_att + branch."""
        args = (self.residual, self.out, self.stats, last.residual_att, branch)
        norm.forward_residual(self.dev, self.config, w, "norm", *args)

    def loss(self, lm_head: Tensor, targets: Tensor) -> None:
        """Per-token losses only. lm_head: (Vp, C). targets: I32 (rows,), -100 where masked."""
        for start, stop in self._chunks():
            with self._logits(start, stop, lm_head) as logits:
                cross_entropy.forward(
                    self.dev,
                    self.losses.rows(start, stop),
                    self.lse.rows(start, stop),
                    logits,
                    targets.rows(start, stop),
                    self.config.vocab_size,
                )

    def loss_and_backward(
        self,
        w: dict[str, Tensor],
        g: dict[str, Accumulator],
        lm_head: Tensor,
        d_lm_head: Accumulator,
        targets: Tensor,
        z_loss: float,
        d_residual: Tensor,
        d_norm: Tensor,
        abs_max: Tensor | None,
    ) -> None:
        """Per-token losses, the head's gradients, and d_residual (rows, C) for the last block.

        d_norm (rows, C) is scratch. abs_max F32 (1,): max'ed with the largest absolute value of
        d_residual. The loss is the sum over tokens; nothing is divided here.
        """
        for start, stop in self._chunks():
            with self._logits(start, stop, lm_head) as logits:
                cross_entropy.forward_backward(
                    self.dev,
                    logits,
                    self.losses.rows(start, stop),
                    self.lse.rows(start, stop),
                    targets.rows(start, stop),
                    self.config.vocab_size,
                    z_loss,
                )
                accumulate = d_lm_head.accumulate or start > 0
                target = d_lm_head._replace(accumulate=accumulate)
                linear.weight_gradient(self.dev, target, logits, self.out.rows(start, stop))
                matmul(self.dev, d_norm.rows(start, stop), logits, lm_head)
        args = (d_residual, d_norm, self.residual, self.stats, None)
        norm.backward(self.dev, w, g, "norm", *args, abs_max)

    def _chunks(self) -> list[tuple[int, int]]:
        size = self.rows // self.chunks
        return [(start, start + size) for start in range(0, self.rows, size)]

    @contextmanager
    def _logits(self, start: int, stop: int, lm_head: Tensor) -> Iterator[Tensor]:
        shape = (stop - start, lm_head.shape[0])
        with self.dev.scratch("logits", shape, self.dtype) as logits:
            linear.forward(self.dev, logits, self.out.rows(start, stop), lm_head)
            yield logits
