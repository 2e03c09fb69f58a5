"""One transformer block: what it keeps, forward, recompute, backward.

    residual[l] -> ln1 -> qkv (-> qk_norm) -> rope -> attention -> o  --+--> residual_att
                                                     residual[l] ------+
    residual_att -> ln2 -> up -> swiglu|gelu -> down --+--> residual[l+1]
                                     residual_att -----+

Both additions happen inside the norm that follows: the second one in the next block's ln1 or in
the head's norm, which is why a block's output stays split into `residual_att` and `branch`.
Activations are (rows, features), rows = B*T.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from llmq import linear, norm
from llmq.config import ModelConfig
from llmq.dtypes import F32, DType
from llmq.ops import attention, gelu, qk_norm, rope, swiglu
from llmq.runtime.device import Device
from llmq.runtime.tensor import Accumulator, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What is computed again in the backward pass instead of being kept; see `normalized`."""

    swiglu: bool = False
    norm: bool = False
    ffn: bool = False
    qkv: bool = False
    att: bool = False
    block: bool = False

    def normalized(self) -> Recompute:
        """With implications: block => att, ffn, norm; att => qkv; ffn => swiglu."""
        att, ffn = self.att or self.block, self.ffn or self.block
        return Recompute(
            swiglu=self.swiglu or ffn,
            norm=self.norm or self.block,
            ffn=ffn,
            qkv=self.qkv or att,
            att=att,
            block=self.block,
        )


def activation_table(config: ModelConfig, recompute: Recompute) -> dict[str, tuple[int, bool]]:
    """name -> (features per token, kept from forward to backward), in order of computation."""
    r, C, F = recompute.normalized(), config.hidden_size, config.intermediate_size
    heads = config.num_heads + config.num_kv_heads
    table = {
        "ln1": (C, not (r.norm or r.att)),
        "qkv": (config.qkv_channels, not r.qkv),
        "att": (config.num_heads * config.head_dim, not r.att),
        "ln2": (C, not (r.norm or r.ffn)),
        "mlp_up": (2 * F if config.activation == "swiglu" else F, not r.ffn),
        "mlp_act": (F, not r.swiglu),
    }
    if config.qk_norm:
        table["qk_raw"] = (heads * config.head_dim, not r.qkv)
    return table


class Layer:
    """What one block keeps: its input, statistics, and the activations that are not recomputed."""

    def __init__(self, blocks: Blocks, index: int):
        dev, config, rows = blocks.dev, blocks.config, blocks.rows

        def keep(name: str, *shape: int, dtype: DType) -> Tensor:
            return dev.alloc(f"{name}.{index}", shape, dtype, "Activations")

        dtype, C, Hq, Hkv = blocks.dtype, config.hidden_size, config.num_heads, config.num_kv_heads
        self.residual = keep("residual", rows, C, dtype=dtype)
        self.residual_att = blocks.residual_att or keep("residual_att", rows, C, dtype=dtype)
        self.ln1_stats = norm.alloc_stats(dev, config, f"ln1.{index}", rows)
        self.ln2_stats = norm.alloc_stats(dev, config, f"ln2.{index}", rows)
        self.lse = keep("lse", blocks.B, Hq, blocks.T, dtype=F32)
        self.kept = {
            name: keep(name, rows, features, dtype=dtype)
            for name, (features, kept) in blocks.table.items()
            if kept
        }
        if config.qk_norm:
            self.kept["qk_rstd"] = keep("qk_rstd", blocks.B, blocks.T, Hq + Hkv, dtype=F32)


class Blocks:
    """All blocks of a model: they share code, the table, and the buffers between blocks."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        recompute: Recompute,
        dtype: DType,
        B: int,
        T: int,
        *,
        attention_backend: str,
        attention_chunks: int,
    ):
        """Allocates every activation of B sequences of T tokens."""
        self.dev, self.config, self.dtype, self.B, self.T = dev, config, dtype, B, T
        self.rows = B * T
        self.recompute = recompute.normalized()
        self.table = activation_table(config, recompute)
        self.backend, self.chunks = attention_backend, attention_chunks
        shape = (self.rows, config.hidden_size)
        # With a recomputed block, residual_att only has to survive until the next block's ln1.
        self.residual_att = (
            dev.alloc("residual_att", shape, dtype, "Activations") if self.recompute.block else None
        )
        self.branch = dev.alloc("branch", shape, dtype, "Activations")
        self.layers = [Layer(self, index) for index in range(config.num_layers)]
        self.rope_table: Tensor | None = None
        if config.positions == "rope":
            table = rope.make_table(T, config.head_dim, config.rope_theta, config.rope_scaling)
            self.rope_table = dev.alloc("rope_table", table.shape, F32, "Activations")
            dev.upload(self.rope_table, table)

    def _enter(self, temps: ExitStack, index: int, *names: str) -> dict[str, Tensor]:
        """The named activations of a layer: kept ones, and scratch for those that are not."""
        kept = self.layers[index].kept
        return {
            name: kept[name]
            if name in kept
            else temps.enter_context(
                self.dev.scratch(name, (self.rows, self.table[name][0]), self.dtype)
            )
            for name in names
        }

    def _attention_names(self) -> tuple[str, ...]:
        return ("ln1", "qkv", "att", "qk_raw") if self.config.qk_norm else ("ln1", "qkv", "att")

    def _packed(self, qkv: Tensor) -> Tensor:
        heads = self.config.num_heads + 2 * self.config.num_kv_heads
        return qkv.view(self.B, self.T, heads, self.config.head_dim)

    def _heads(self, att: Tensor) -> Tensor:
        return att.view(self.B, self.T, self.config.num_heads, self.config.head_dim)

    def forward(self, index: int, w: dict[str, Tensor]) -> None:
        """residual[l] (or, for l > 0, residual_att[l-1] + branch) -> residual_att[l], branch."""
        layer, dev, config = self.layers[index], self.dev, self.config
        with ExitStack() as temps:
            a = self._enter(temps, index, *self._attention_names())
            stats = layer.ln1_stats
            if index == 0:
                norm.forward(dev, config, w, "ln1", a["ln1"], stats, layer.residual)
            else:
                before = self.layers[index - 1].residual_att
                args = (layer.residual, a["ln1"], stats, before, self.branch)
                norm.forward_residual(dev, config, w, "ln1", *args)
            self._qkv(layer, a, w)
            self._attention(layer, a)
            linear.forward(dev, self.branch, a["att"], w["o"], w.get("o_bias"))
        with ExitStack() as temps:
            a = self._enter(temps, index, "ln2", "mlp_up", "mlp_act")
            args = (layer.residual_att, a["ln2"], layer.ln2_stats, layer.residual, self.branch)
            norm.forward_residual(dev, config, w, "ln2", *args)
            linear.forward(dev, a["mlp_up"], a["ln2"], w["up"], w.get("up_bias"))
            self._activate(a)
            linear.forward(dev, self.branch, a["mlp_act"], w["down"], w.get("down_bias"))

    def _qkv(self, layer: Layer, a: dict[str, Tensor], w: dict[str, Tensor]) -> None:
        dev, config = self.dev, self.config
        heads = (config.num_heads, config.num_kv_heads)
        linear.forward(dev, a["qkv"], a["ln1"], w["qkv"], w.get("qkv_bias"))
        qkv = self._packed(a["qkv"])
        if config.qk_norm:
            raw = a["qk_raw"].view(self.B, self.T, sum(heads), config.head_dim)
            args = (raw, layer.kept["qk_rstd"], w["q_norm"], w["k_norm"], config.norm_eps)
            qk_norm.forward(dev, qkv, *args, *heads)
        if self.rope_table is not None:
            rope.forward(dev, qkv, self.rope_table, *heads)

    def _attention(self, layer: Layer, a: dict[str, Tensor]) -> None:
        heads = (self.config.num_heads, self.config.num_kv_heads)
        out, qkv = self._heads(a["att"]), self._packed(a["qkv"])
        attention.forward(self.dev, out, layer.lse, qkv, *heads, backend=self.backend)

    def _activate(self, a: dict[str, Tensor]) -> None:
        op = swiglu if self.config.activation == "swiglu" else gelu
        op.forward(self.dev, a["mlp_act"], a["mlp_up"])

    def _recompute_attention(
        self, index: int, w: dict[str, Tensor], temps: ExitStack
    ) -> dict[str, Tensor]:
        """The attention half's activations; what was not kept is computed again."""
        r, layer, dev, config = self.recompute, self.layers[index], self.dev, self.config
        a = self._enter(temps, index, *self._attention_names())
        if "ln1" not in layer.kept:
            norm.forward(dev, config, w, "ln1", a["ln1"], layer.ln1_stats, layer.residual)
        if r.qkv:
            self._qkv(layer, a, w)
        if r.att:
            self._attention(layer, a)
        return a

    def _recompute_mlp(
        self, index: int, w: dict[str, Tensor], temps: ExitStack
    ) -> dict[str, Tensor]:
        r, layer, dev, config = self.recompute, self.layers[index], self.dev, self.config
        a = self._enter(temps, index, "ln2", "mlp_up", "mlp_act")
        if r.block:
            args = (layer.residual_att, a["ln2"], layer.ln2_stats, layer.residual, self.branch)
            norm.forward_residual(dev, config, w, "ln2", *args)
        elif "ln2" not in layer.kept:
            norm.forward(dev, config, w, "ln2", a["ln2"], layer.ln2_stats, layer.residual_att)
        if r.ffn:
            linear.forward(dev, a["mlp_up"], a["ln2"], w["up"], w.get("up_bias"))
        if r.swiglu:
            self._activate(a)
        return a

    def backward(
        self,
        index: int,
        w: dict[str, Tensor],
        g: dict[str, Accumulator],
        d_residual: Tensor,
        d_norm: Tensor,
    ) -> None:
        """d_residual (rows, C): gradient of the block's output in, of its input out.

        d_norm (rows, C): scratch for the gradient of a norm's output.
        """
        layer, dev, config = self.layers[index], self.dev, self.config
        with ExitStack() as att_temps:
            if self.recompute.block:  # residual_att is needed first, and needs the attention
                a = self._recompute_attention(index, w, att_temps)
                linear.forward(dev, self.branch, a["att"], w["o"], w.get("o_bias"))
            with ExitStack() as temps:
                mlp = self._recompute_mlp(index, w, temps)
                self._backward_mlp(layer, mlp, w, g, d_residual, d_norm)
            if not self.recompute.block:
                a = self._recompute_attention(index, w, att_temps)
            self._backward_attention(layer, a, w, g, d_residual, d_norm)
        norm.backward(
            dev, w, g, "ln1", d_residual, d_norm, layer.residual, layer.ln1_stats, d_residual
        )

    def _backward_mlp(
        self,
        layer: Layer,
        a: dict[str, Tensor],
        w: dict[str, Tensor],
        g: dict[str, Accumulator],
        d_residual: Tensor,
        d_norm: Tensor,
    ) -> None:
        dev, op = self.dev, swiglu if self.config.activation == "swiglu" else gelu
        with dev.scratch("d_mlp_act", a["mlp_act"].shape, self.dtype) as d_mlp_act:
            grads = (g["down"], g.get("down_bias"))
            linear.backward(dev, d_mlp_act, *grads, d_residual, a["mlp_act"], w["down"])
            d_mlp_up = a["mlp_up"]  # in place: the activation is not needed again
            op.backward(dev, d_mlp_up, d_mlp_act, a["mlp_up"])
        linear.backward(dev, d_norm, g["up"], g.get("up_bias"), d_mlp_up, a["ln2"], w["up"])
        norm.backward(
            dev, w, g, "ln2", d_residual, d_norm, layer.residual_att, layer.ln2_stats, d_residual
        )

    def _backward_attention(
        self,
        layer: Layer,
        a: dict[str, Tensor],
        w: dict[str, Tensor],
        g: dict[str, Accumulator],
        d_residual: Tensor,
        d_norm: Tensor,
    ) -> None:
        dev, config = self.dev, self.config
        heads = (config.num_heads, config.num_kv_heads)
        with dev.scratch("d_qkv", a["qkv"].shape, self.dtype) as d_qkv:
            packed = self._packed(d_qkv)
            with dev.scratch("d_att", a["att"].shape, self.dtype) as d_att:
                linear.backward(dev, d_att, g["o"], g.get("o_bias"), d_residual, a["att"], w["o"])
                out, qkv = self._heads(a["att"]), self._packed(a["qkv"])
                attention.backward(
                    dev, packed, self._heads(d_att), out, layer.lse, qkv, *heads,
                    chunks=self.chunks, backend=self.backend,
                )  # fmt: skip
            if self.rope_table is not None:
                rope.backward(dev, packed, self.rope_table, *heads)
            if config.qk_norm:
                raw = a["qk_raw"].view(self.B, self.T, sum(heads), config.head_dim)
                weights = (w["q_norm"], w["k_norm"])
                args = (raw, layer.kept["qk_rstd"], *weights, *heads)
                qk_norm.backward(dev, packed, g["q_norm"], g["k_norm"], *args)
            linear.backward(dev, d_norm, g["qkv"], g.get("qkv_bias"), d_qkv, a["ln1"], w["qkv"])
