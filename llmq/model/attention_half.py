"""The attention half of a block, between its norm and the residual stream.

    x -> qkv (-> qk_norm) (-> rope) -> attention -> o -> out

`operands` turns a tensor into what products take: with fp8 codes and a scale, without it itself.
Heads lie side by side: (rows, Q) is (B, T, Hq + 2 Hkv, Hd), query heads, key heads, value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32
from llmq.base.operand import Operand, Target
from llmq.base.tensor import Accumulator, Tensor
from llmq.model.activations import Layer
from llmq.model.attention_choice import directions
from llmq.model.block_linear import BlockLinear
from llmq.model.operands import InputAgain, Operands
from llmq.model.parameters import BlockGrads, BlockWeights
from llmq.ops import attention, attention_backward, qk_norm, rope
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device


class _Tensors(NamedTuple):
    """qkv: (rows, Q). qk_raw: (B, T, Hq + Hkv, Hd), None without qk_norm. att: (rows, Hq * Hd)."""

    qkv: Tensor
    qk_raw: Tensor | None
    att: Tensor


class AttentionAgain(NamedTuple):
    """What backward needs. x: (rows, C), o_input: att as the output product's operand; None where
    no gradient needs it."""

    x: Operand | None
    tensors: _Tensors
    o_input: Operand | None


def alloc_rope_tables(dev: Device, config: ModelConfig, positions: int) -> list[Tensor | None]:
    """Of each layer F32 (positions, Hd/2, 2), filled; None for models without RoPE.

    Layers with the same angles share a table.
    """
    tables: dict[tuple, Tensor] = {}

    def table_of(layer: int) -> Tensor | None:
        angles = config.rope_of(layer)
        if angles is not None and angles not in tables:
            table = rope.make_table(positions, config.head_dim, *angles)
            name = f"rope_table.{len(tables)}" if tables else "rope_table"
            tables[angles] = dev.alloc(name, table.shape, F32, "Activations")
            dev.upload(tables[angles], table)
        return tables.get(angles)

    return [table_of(layer) for layer in range(config.num_layers)]


def qk_normalization(config: ModelConfig) -> tuple[Callable[..., None], Callable[..., None]]:
    """The calls of the model's norm of queries and keys: forward, backward."""
    kind = {"wide": config.arch.wide_qk_norm, "offset": config.arch.norm_offset}
    return partial(qk_norm.forward, **kind), partial(qk_norm.backward, **kind)


class AttentionHalf:
    """The attention halves of all layers. Scratch lives as long as `temps`."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        options: TrainConfig,
        operands: Operands,
        linear: BlockLinear,
        backend: str,
        starts: Tensor | None,
    ):
        """backend: as directions takes it. starts: I32 (B,T), of documents; None: all are 0."""
        self.dev, self.operands, self.linear = dev, operands, linear
        self.B, self.T = options.batch_size, options.seq_len
        self.Hq, self.Hkv = config.num_heads, config.num_kv_heads
        self.Hd, self.eps = config.head_dim, config.norm_eps
        self.chunks = options.attn_bwd_chunks
        windows = [config.window_of(layer) for layer in range(config.num_layers)]
        sizes, capability = (backend, self.Hd, self.T), dev.spec.capability
        self.backends = [directions(*sizes, window, capability) for window in windows]
        self.starts, self.sights = starts, [attention.Sight(starts, window) for window in windows]
        self.rope_tables = alloc_rope_tables(dev, config, self.T)
        self.qk_norm, self.qk_norm_backward = qk_normalization(config)

    def _by_head(self, tensor: Tensor) -> Tensor:
        """(rows, n * Hd) as (B, T, n, Hd)."""
        return tensor.view(self.B, self.T, tensor.shape[1] // self.Hd, self.Hd)

    def _tensors(self, temps: ExitStack, layer: Layer) -> _Tensors:
        """Where they are kept, else scratch."""
        qkv, qk_raw = layer.qkv.place(self.dev, temps), None
        if layer.qk_raw is not None:
            qk_raw = self._by_head(layer.qk_raw.place(self.dev, temps))
        return _Tensors(qkv, qk_raw, layer.att.place(self.dev, temps))

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, temps: ExitStack, layer: Layer, w: BlockWeights, x: Operand) -> None:
        """layer.att_out from x (rows, C)."""
        tensors = self._tensors(temps, layer)
        self._qkv(layer, w, x, tensors)
        self._attend(layer, tensors)
        o_input = self.operands.of_tensor(
            temps, layer.att.slot, tensors.att, measured=False, transposed=False
        )
        out, addend = layer.att_out
        self.linear.forward(layer.index, "o", out, o_input, w, addend)

    def _qkv(self, layer: Layer, w: BlockWeights, x: Operand, to: _Tensors) -> None:
        """The query, key and value heads that attention takes."""
        qkv, table = self._by_head(to.qkv), self.rope_tables[layer.index]
        self.linear.forward(layer.index, "qkv", to.qkv, x, w)
        if to.qk_raw is not None:
            self.qk_norm(
                self.dev, qkv, to.qk_raw, layer.qk_rstd, w.q_norm, w.k_norm, self.eps,
                self.Hq, self.Hkv,
            )  # fmt: skip
        if table is not None:
            rope.forward(self.dev, qkv, table, self.Hq, self.Hkv, starts=self.starts)

    def _attend(self, layer: Layer, tensors: _Tensors) -> None:
        out, qkv = self._by_head(tensors.att), self._by_head(tensors.qkv)
        sight, (backend, _) = self.sights[layer.index], self.backends[layer.index]
        attention.forward(self.dev, out, layer.lse, qkv, self.Hq, self.Hkv, sight, backend=backend)

    # -- backward --------------------------------------------------------------------------------

    def again(
        self,
        temps: ExitStack,
        layer: Layer,
        w: BlockWeights,
        g: BlockGrads,
        x_again: InputAgain,
    ) -> AttentionAgain:
        """What backward needs, kept or computed again; if the whole block is, layer.att_out too."""
        r = layer.recompute
        tensors = self._tensors(temps, layer)
        x = None
        if r.qkv or self.linear.needs_input(layer.index, "qkv", g):
            x = x_again(product=r.qkv)
        if r.qkv:
            self._qkv(layer, w, x, tensors)
        if r.att:
            self._attend(layer, tensors)
        o_input = None
        if r.block or self.linear.needs_input(layer.index, "o", g):
            slot = layer.att.slot
            o_input = self.operands.of_tensor_again(temps, slot, tensors.att, product=r.block)
        if r.block:
            out, addend = layer.att_out
            self.linear.forward(layer.index, "o", out, o_input, w, addend)
        return AttentionAgain(x, tensors, o_input)

    def backward(
        self,
        layer: Layer,
        w: BlockWeights,
        g: BlockGrads,
        again: AttentionAgain,
        d_out: Tensor,
        d_x: Tensor | None,
        *,
        heads: bool,
    ) -> None:
        """d_x (rows, C), if it is wanted, and the weights' gradients, from d_out (rows, C).

        heads: whether the gradient of queries, keys and values is wanted, for d_x or else.
        """
        dev, (qkv, qk_raw, att) = self.dev, again.tensors
        if not heads:
            self._backward_o(layer, w, g, again, d_out, None)
            return
        with ExitStack() as temps:
            d_qkv = temps.enter_context(dev.scratch("d_qkv", qkv.shape, qkv.dtype))
            with ExitStack() as inner:
                d_att = inner.enter_context(dev.scratch("d_att", att.shape, att.dtype))
                self._backward_o(layer, w, g, again, d_out, d_att)
                by_head, sight = self._by_head(qkv), self.sights[layer.index]
                attention.backward(
                    dev, self._by_head(d_qkv), self._by_head(d_att), self._by_head(att), layer.lse,
                    by_head, self.Hq, self.Hkv, self.chunks, sight,
                    backend=self.backends[layer.index][1],
                    own=attention_backward.chosen(dev, by_head, sight),
                )  # fmt: skip
            d_product, d_bias = self._backward_positions(temps, layer, w, g, qk_raw, d_qkv)
            self.linear.input_gradient(layer.index, "qkv", d_x, d_product, w, g)
            self.linear.weight_gradients(layer.index, "qkv", g, d_bias, d_product, again.x)

    def _backward_o(
        self,
        layer: Layer,
        w: BlockWeights,
        g: BlockGrads,
        again: AttentionAgain,
        d_out: Tensor,
        d_att: Tensor | None,
    ) -> None:
        with ExitStack() as temps:
            d_o = self.operands.half_gradient(temps, layer.slot("d_att"), d_out)
            self.linear.input_gradient(layer.index, "o", d_att, d_o, w, g)
            self.linear.weight_gradients(layer.index, "o", g, g.o_bias, d_o, again.o_input)

    def _backward_positions(
        self,
        temps: ExitStack,
        layer: Layer,
        w: BlockWeights,
        g: BlockGrads,
        qk_raw: Tensor | None,
        d_qkv: Tensor,
    ) -> tuple[Operand, Accumulator | None]:
        """RoPE and the q and k norms backward, of d_qkv (rows, Q) as attention has made it.

        Returns the gradient of the qkv product, and the bias's gradient if it is left to do.
        """
        slot, by_head = layer.slot("d_qkv"), self._by_head(d_qkv)
        table = self.rope_tables[layer.index]
        if table is not None and qk_raw is None:

            def write(to: Target) -> None:
                rope.backward(
                    self.dev, by_head, table, self.Hq, self.Hkv, self.starts,
                    abs_max=to.abs_max, d_bias=g.qkv_bias, fp8=to.fp8,
                )  # fmt: skip

            gradient = self.operands.gradient
            return gradient(temps, slot, write, shape=d_qkv.shape, out=d_qkv, bias=False), None
        if table is not None:
            rope.backward(self.dev, by_head, table, self.Hq, self.Hkv, self.starts)
        if qk_raw is not None:
            self.qk_norm_backward(
                self.dev, by_head, g.q_norm, g.k_norm, qk_raw, layer.qk_rstd, w.q_norm, w.k_norm,
                self.Hq, self.Hkv,
            )  # fmt: skip
        made = self.operands.of_tensor(temps, slot, d_qkv, measured=False, transposed=True)
        return made, g.qkv_bias
