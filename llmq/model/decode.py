"""Inference with a key-value cache: the same layers, a few tokens at a time, no gradients."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, I32, DType
from llmq.base.operand import Target
from llmq.base.tensor import Tensor
from llmq.model.attention_half import alloc_rope_tables, qk_normalization
from llmq.model.linear import Linear
from llmq.model.mlp_half import activation
from llmq.model.norm import Normalization, Stats
from llmq.model.parameters import BlockWeights, EmbeddingWeights, HeadWeights
from llmq.ops import attention, embedding, rope
from llmq.runtime.device import Device
from llmq.state.weights import Weights


class Decoder:
    """One sequence of at most `positions` tokens; call `forward` with what comes next."""

    def __init__(self, dev: Device, config: ModelConfig, weights: Weights, positions: int):
        self.dev, self.config, self.weights, self.positions = dev, config, weights, positions
        self.dtype: DType = weights.placement["embed"].work.dtype
        self.linear, self.norm = Linear(dev), Normalization(dev, config)
        self.activate, _ = activation(config)
        self.qk_norm, _ = qk_normalization(config)
        shape = (1, positions, config.num_kv_heads, config.head_dim)

        def cache(name: str) -> list[Tensor]:
            names = [f"{name}.{layer}" for layer in range(config.num_layers)]
            return [dev.alloc(n, shape, self.dtype, "Activations") for n in names]

        self.k_cache, self.v_cache = cache("k_cache"), cache("v_cache")
        self.tokens = dev.alloc("tokens", (positions,), I32, "Activations")
        self.rope_tables = alloc_rope_tables(dev, config, positions)
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
        dev, config, n = self.dev, self.config, out.shape[0]
        w, before = BlockWeights(**self._get(f"layers.{layer}")), branch if layer > 0 else None
        x = self._norm(out, stats, residual, before, w.ln1_post, w.ln1, w.ln1_bias)
        self._attention(layer, w, branch, x, position)
        x = self._norm(out, stats, residual, branch, w.ln2_post, w.ln2, w.ln2_bias)
        F = config.intermediate_size
        with (
            dev.scratch("mlp_up", (n, w.up.shape[0]), self.dtype) as mlp_up,
            dev.scratch("mlp_act", (n, F), self.dtype) as mlp_act,
        ):
            self.linear.forward(mlp_up, x, w.up, w.up_bias)
            self.activate(dev, mlp_act, mlp_up)
            self.linear.forward(branch, mlp_act, w.down, w.down_bias)

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

    def _attention(
        self, layer: int, w: BlockWeights, branch: Tensor, x: Tensor, position: int
    ) -> None:
        dev, config, n = self.dev, self.config, x.shape[0]
        Hq, Hkv, Hd = config.num_heads, config.num_kv_heads, config.head_dim
        with (
            dev.scratch("qkv", (n, config.qkv_channels), self.dtype) as flat,
            dev.scratch("att", (n, Hq * Hd), self.dtype) as att,
        ):
            self.linear.forward(flat, x, w.qkv, w.qkv_bias)
            qkv = flat.view(1, n, Hq + 2 * Hkv, Hd)
            if config.qk_norm:
                wide = config.arch.wide_qk_norm
                with (
                    dev.scratch("qk_raw", (1, n, Hq + Hkv, Hd), self.dtype) as raw,
                    dev.scratch("qk_rstd", (1, n, 2 if wide else Hq + Hkv), F32) as rstd,
                ):
                    self.qk_norm(dev, qkv, raw, rstd, w.q_norm, w.k_norm, config.norm_eps, Hq, Hkv)
            table = self.rope_tables[layer]
            if table is not None:
                rope.forward(dev, qkv, table, Hq, Hkv, first_position=position)
            k, v = self.k_cache[layer], self.v_cache[layer]
            window, out = config.window_of(layer), att.view(1, n, Hq, Hd)
            attention.decode(dev, out, qkv, k, v, position, Hq, Hkv, window)
            self.linear.forward(branch, att, w.o, w.o_bias)

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
