"""Inference with a key-value cache: the same layers, a few tokens at a time, no gradients."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, I32, DType
from llmq.base.operand import Target
from llmq.base.tensor import Tensor
from llmq.model.halves import HALVES
from llmq.model.linear import Linear
from llmq.model.norm import Normalization, Stats
from llmq.model.parameters import BlockWeights, EmbeddingWeights, HeadWeights
from llmq.ops import embedding
from llmq.runtime.device import Device
from llmq.state.weights import Weights


class Decoder:
    """One sequence of at most `positions` tokens; call `forward` with what comes next."""

    def __init__(self, dev: Device, config: ModelConfig, weights: Weights, positions: int):
        self.dev, self.config, self.weights, self.positions = dev, config, weights, positions
        self.dtype: DType = weights.placement["embed"].work.dtype
        self.linear, self.norm = Linear(dev), Normalization(dev, config)
        layers = range(config.num_layers)
        kinds = dict.fromkeys(half.kind for layer in layers for half in config.halves(layer))
        sizes = (dev, config, self.linear, self.dtype, positions)
        self.halves = {kind: HALVES[kind].decoder(*sizes) for kind in kinds}
        self.tokens = dev.alloc("tokens", (positions,), I32, "Activations")
        self.logits = dev.alloc("logits", (1, config.padded_vocab), self.dtype, "Activations")

    def forward(self, tokens: np.ndarray, position: int) -> None:
        """Run tokens (n,), the sequence's elements [position, position + n).

        self.logits (1, Vp) then predicts element position + n.
        """
        n, C = len(tokens), self.config.hidden_size
        if not 0 < n <= self.positions - position:
            raise ValueError(f"decode: {n} tokens at {position} exceed {self.positions} positions")
        part = self.tokens.rows(0, n)
        self.dev.upload(part, tokens.astype(np.int32))
        with ExitStack() as temps:

            def scratch(name: str, *shape: int, dtype: DType = self.dtype) -> Tensor:
                return temps.enter_context(self.dev.scratch(name, shape, dtype))

            residual, branch, out = (scratch(s, n, C) for s in ("residual", "branch", "norm"))
            layernorm = self.config.norm == "layernorm"
            mean = scratch("mean", n, dtype=F32) if layernorm else None
            stats = Stats(scratch("rstd", n, dtype=F32), mean)
            w = EmbeddingWeights(**self._get("embed"))
            rows, ids = residual.view(1, n, C), part.view(1, n)
            scale = self.config.embedding_scale
            embedding.forward(self.dev, rows, ids, w.embed, w.positions, position, scale)
            for layer in range(self.config.num_layers):
                self._block(layer, residual, branch, out, stats, position)
            self._head(residual, branch, out, stats)

    def _get(self, name: str) -> dict[str, Tensor]:
        self.weights.gather(name)
        views = self.weights.get(name)
        self.weights.release(name)
        return views

    def _block(
        self,
        layer: int,
        residual: Tensor,
        branch: Tensor,
        out: Tensor,
        stats: Stats,
        position: int,
    ) -> None:
        w, before = BlockWeights(self._get(f"layers.{layer}")), branch if layer > 0 else None
        for half in self.config.halves(layer):
            norm = half.norm
            weights = (w.get(f"{norm}_post"), w.get(norm), w.bias(norm))
            x = self._norm(out, stats, residual, before, *weights)
            self.halves[half.kind].forward(layer, half, w, branch, x, position)
            before = branch

    def _norm(
        self,
        out: Tensor,
        stats: Stats,
        residual: Tensor,
        branch: Tensor | None,
        post: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """The branch, if there is one, goes into the residual stream; returns a half's input.

        post, weight: of the branch's and of the stream's norm, None where there is none.
        """
        to = Target(out)
        if post is not None and branch is not None:
            self.norm.post(Target(residual), stats, branch, residual, post)
            branch = None
        if weight is None:
            return residual
        if branch is None:
            self.norm.forward(to, stats, residual, weight, bias)
        else:
            self.norm.forward_residual(residual, to, stats, residual, branch, weight, bias)
        return out

    def _head(self, residual: Tensor, branch: Tensor, out: Tensor, stats: Stats) -> None:
        config, n = self.config, out.shape[0]
        w = HeadWeights(**self._get("head"))
        if config.arch.post_norm:
            self._norm(out, stats, residual, branch, w.ln1_post, None, None)
            self.norm.post(Target(out), stats, residual, None, w.norm)
        else:
            self._norm(out, stats, residual, branch, None, w.norm, w.norm_bias)
        lm_head = self._get("embed")["embed"] if config.tied_embeddings else w.lm_head
        self.linear.forward(self.logits, out.rows(n - 1, n), lm_head)
