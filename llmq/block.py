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
from types import ModuleType

from llmq import linear, norm
from llmq.config import ModelConfig
from llmq.dtypes import F32, DType
from llmq.linear import Operand
from llmq.operands import Fp8Options, Operands
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """features: per token. kept: from forward to backward, else scratch. fp8: only its fp8 codes
    are kept, transposed, because backward only needs it for a weight's gradient.
    """

    features: int
    kept: bool
    fp8: bool = False


def activation_table(config: ModelConfig, recompute: Recompute, fp8: bool) -> dict[str, Activation]:
    """By name, in order of computation. A product that is recomputed in fp8 needs its input's codes
    as they lie, so that input is recomputed too."""
    r, C, F = recompute.normalized(), config.hidden_size, config.intermediate_size
    heads = config.num_heads + config.num_kv_heads
    gated = config.activation == "swiglu"
    table = {
        "ln1": Activation(features=C, kept=not (r.norm or (r.qkv if fp8 else r.att)), fp8=fp8),
        "qkv": Activation(features=config.qkv_channels, kept=not r.qkv),
        "att": Activation(features=config.num_heads * config.head_dim, kept=not r.att),
        "ln2": Activation(features=C, kept=not (r.norm or r.ffn), fp8=fp8),
        "mlp_up": Activation(features=2 * F if gated else F, kept=not r.ffn),
        "mlp_act": Activation(features=F, kept=not r.swiglu, fp8=fp8),
    }
    if config.qk_norm:
        table["qk_raw"] = Activation(features=heads * config.head_dim, kept=not r.qkv)
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
        self.kept: dict[str, Tensor] = {}
        self.codes: dict[str, Tensor] = {}  # fp8, (features, rows)
        for name, entry in blocks.table.items():
            if entry.kept and entry.fp8:
                codes = keep(f"{name}_t", entry.features, rows, dtype=blocks.fp8.value)
                self.codes[name] = codes
            elif entry.kept:
                self.kept[name] = keep(name, rows, entry.features, dtype=dtype)
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
        fp8: Fp8Options | None,
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
        self.fp8 = fp8
        self.operands = Operands(dev, fp8, config.num_layers)
        self.table = activation_table(config, recompute, fp8 is not None)
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
        return {n: kept[n] if n in kept else self._scratch(temps, n) for n in names}

    def _scratch(self, temps: ExitStack, name: str) -> Tensor:
        shape = (self.rows, self.table[name].features)
        return temps.enter_context(self.dev.scratch(name, shape, self.dtype))

    def _qkv_names(self) -> tuple[str, ...]:
        return ("qkv", "qk_raw") if self.config.qk_norm else ("qkv",)

    def _packed(self, qkv: Tensor) -> Tensor:
        heads = self.config.num_heads + 2 * self.config.num_kv_heads
        return qkv.view(self.B, self.T, heads, self.config.head_dim)

    def _heads(self, att: Tensor) -> Tensor:
        return att.view(self.B, self.T, self.config.num_heads, self.config.head_dim)

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, index: int, w: dict[str, Operand]) -> None:
        """residual[l] (or, for l > 0, residual_att[l-1] + branch) -> residual_att[l], branch."""
        layer, dev, config = self.layers[index], self.dev, self.config
        with ExitStack() as temps:
            a = self._enter(temps, index, "ln1", *self._qkv_names(), "att")
            stats, abs_max = layer.ln1_stats, self.operands.abs_max(index, "ln1")
            if index == 0:
                args = (a["ln1"], stats, layer.residual)
                norm.forward(dev, config, w, "ln1", *args, abs_max)
            else:
                before = self.layers[index - 1].residual_att
                args = (layer.residual, a["ln1"], stats, before, self.branch)
                norm.forward_residual(dev, config, w, "ln1", *args, abs_max)
            self._qkv(layer, a, self._input(temps, index, "ln1", a["ln1"]), w)
            self._attention(layer, a)
            self.operands.measure(index, "att", a["att"])
            x = self.operands.input(temps, index, "att", a["att"], transposed=False)
            linear.forward(dev, self.branch, x, w["o"], w.get("o_bias"))
        with ExitStack() as temps:
            a = self._enter(temps, index, "ln2", "mlp_up", "mlp_act")
            args = (layer.residual_att, a["ln2"], layer.ln2_stats, layer.residual, self.branch)
            abs_max = self.operands.abs_max(index, "ln2")
            norm.forward_residual(dev, config, w, "ln2", *args, abs_max)
            x = self._input(temps, index, "ln2", a["ln2"])
            linear.forward(dev, a["mlp_up"], x, w["up"], w.get("up_bias"))
            self._activate(a, self.operands.abs_max(index, "mlp_act"))
            x = self._input(temps, index, "mlp_act", a["mlp_act"])
            linear.forward(dev, self.branch, x, w["down"], w.get("down_bias"))

    def _input(self, temps: ExitStack, index: int, name: str, x: Tensor) -> Operand:
        """A forward product's input; its transposed codes are kept if the table says so."""
        codes = self.layers[index].codes.get(name)
        return self.operands.input(temps, index, name, x, transposed=False, kept=codes)

    def _qkv(self, layer: Layer, a: dict[str, Tensor], x: Operand, w: dict[str, Operand]) -> None:
        dev, config = self.dev, self.config
        heads = (config.num_heads, config.num_kv_heads)
        linear.forward(dev, a["qkv"], x, w["qkv"], w.get("qkv_bias"))
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

    @property
    def _activation(self) -> ModuleType:
        return swiglu if self.config.activation == "swiglu" else gelu

    def _activate(self, a: dict[str, Tensor], abs_max: Tensor | None) -> None:
        self._activation.forward(self.dev, a["mlp_act"], a["mlp_up"], abs_max=abs_max)

    # -- backward --------------------------------------------------------------------------------

    def backward(
        self,
        index: int,
        w: dict[str, Operand],
        g: dict[str, Accumulator],
        d_residual: Tensor,
        d_norm: Tensor,
    ) -> None:
        """d_residual (rows, C): gradient of the block's output in, of its input out.

        d_norm (rows, C): scratch for the gradient of a norm's output. What was not kept is computed
        again first; the slots of largest values still hold those of the forward pass.
        """
        layer, dev = self.layers[index], self.dev
        with ExitStack() as temps:
            if self.recompute.block:  # residual_att is needed first, and needs the attention
                a, x = self._attention_again(index, w, temps)
                x_att = self.operands.input(temps, index, "att", a["att"], transposed=True)
                linear.forward(dev, self.branch, x_att, w["o"], w.get("o_bias"))
            self._backward_mlp(index, w, g, d_residual, d_norm)
            if not self.recompute.block:
                a, x = self._attention_again(index, w, temps)
                x_att = self.operands.input_again(temps, index, "att", a["att"], None)
            self._backward_attention(index, a, x, x_att, w, g, d_residual, d_norm)
        args = (d_residual, d_norm, layer.residual, layer.ln1_stats, d_residual)
        abs_max = self.operands.abs_max(index - 1, "d_mlp") if index > 0 else None
        norm.backward(dev, w, g, "ln1", *args, abs_max)

    def _norm_again(
        self, index: int, w: dict[str, Operand], temps: ExitStack, key: str, *, product: bool
    ) -> Operand:
        """The output of ln1 or ln2 for backward; product: its product is computed again too."""
        layer, config = self.layers[index], self.config
        if key in layer.codes:
            return self.operands.input_again(temps, index, key, None, layer.codes[key])
        if key in layer.kept:
            return layer.kept[key]
        out = self._scratch(temps, key)
        if key == "ln1":
            norm.forward(self.dev, config, w, key, out, layer.ln1_stats, layer.residual)
        elif self.recompute.block:
            args = (layer.residual_att, out, layer.ln2_stats, layer.residual, self.branch)
            norm.forward_residual(self.dev, config, w, key, *args)
        else:
            norm.forward(self.dev, config, w, key, out, layer.ln2_stats, layer.residual_att)
        if product:
            return self.operands.input(temps, index, key, out, transposed=True)
        return self.operands.input_again(temps, index, key, out, None)

    def _attention_again(
        self, index: int, w: dict[str, Operand], temps: ExitStack
    ) -> tuple[dict[str, Tensor], Operand]:
        """The attention half's activations, and the input of its qkv product."""
        layer, r = self.layers[index], self.recompute
        a = self._enter(temps, index, *self._qkv_names(), "att")
        x = self._norm_again(index, w, temps, "ln1", product=r.qkv)
        if r.qkv:
            self._qkv(layer, a, x, w)
        if r.att:
            self._attention(layer, a)
        return a, x

    def _mlp_again(
        self, index: int, w: dict[str, Operand], temps: ExitStack
    ) -> tuple[Tensor, Operand, Operand]:
        """mlp_up, and the inputs of the up and of the down product."""
        layer, r = self.layers[index], self.recompute
        mlp_up = self._enter(temps, index, "mlp_up")["mlp_up"]
        x = self._norm_again(index, w, temps, "ln2", product=r.ffn)
        if r.ffn:
            linear.forward(self.dev, mlp_up, x, w["up"], w.get("up_bias"))
        codes, act = layer.codes.get("mlp_act"), layer.kept.get("mlp_act")
        if codes is None and act is None:
            act = self._scratch(temps, "mlp_act")
            self._activate({"mlp_act": act, "mlp_up": mlp_up}, None)
        return mlp_up, x, self.operands.input_again(temps, index, "mlp_act", act, codes)

    def _backward_mlp(
        self,
        index: int,
        w: dict[str, Operand],
        g: dict[str, Accumulator],
        d_residual: Tensor,
        d_norm: Tensor,
    ) -> None:
        layer, dev, operands = self.layers[index], self.dev, self.operands
        with ExitStack() as temps:
            mlp_up, x, x_act = self._mlp_again(index, w, temps)
            d_mlp_up = mlp_up  # in place: the activation is not needed again
            with ExitStack() as inner:
                shape = (self.rows, self.table["mlp_act"].features)
                d_mlp_act = inner.enter_context(dev.scratch("d_mlp_act", shape, self.dtype))
                d_out = operands.gradient(inner, index, "d_mlp", d_residual)
                grads = (g["down"], g.get("down_bias"))
                linear.backward(dev, d_mlp_act, *grads, d_out, x_act, w["down"])
                abs_max = operands.abs_max(index, "d_mlp_up")
                self._activation.backward(dev, d_mlp_up, d_mlp_act, mlp_up, abs_max=abs_max)
            d_out = operands.gradient(temps, index, "d_mlp_up", d_mlp_up)
            linear.backward(dev, d_norm, g["up"], g.get("up_bias"), d_out, x, w["up"])
        args = (d_residual, d_norm, layer.residual_att, layer.ln2_stats, d_residual)
        norm.backward(dev, w, g, "ln2", *args, operands.abs_max(index, "d_att"))

    def _backward_attention(
        self,
        index: int,
        a: dict[str, Tensor],
        x: Operand,
        x_att: Operand,
        w: dict[str, Operand],
        g: dict[str, Accumulator],
        d_residual: Tensor,
        d_norm: Tensor,
    ) -> None:
        """x: input of the qkv product. x_att: input of the output product."""
        layer, dev, config = self.layers[index], self.dev, self.config
        heads = (config.num_heads, config.num_kv_heads)
        with ExitStack() as temps:
            d_qkv = temps.enter_context(dev.scratch("d_qkv", a["qkv"].shape, self.dtype))
            with ExitStack() as inner:
                d_att = inner.enter_context(dev.scratch("d_att", a["att"].shape, self.dtype))
                d_out = self.operands.gradient(inner, index, "d_att", d_residual)
                linear.backward(dev, d_att, g["o"], g.get("o_bias"), d_out, x_att, w["o"])
                out, qkv = self._heads(a["att"]), self._packed(a["qkv"])
                attention.backward(
                    dev, self._packed(d_qkv), self._heads(d_att), out, layer.lse, qkv, *heads,
                    chunks=self.chunks, backend=self.backend,
                )  # fmt: skip
            self._backward_positions(index, a, w, g, d_qkv)
            d_out = self.operands.gradient(temps, index, "d_qkv", d_qkv)
            linear.backward(dev, d_norm, g["qkv"], g.get("qkv_bias"), d_out, x, w["qkv"])

    def _backward_positions(
        self,
        index: int,
        a: dict[str, Tensor],
        w: dict[str, Operand],
        g: dict[str, Accumulator],
        d_qkv: Tensor,
    ) -> None:
        """RoPE and the q and k norms, in place in d_qkv; then its largest value is recorded."""
        layer, dev, config = self.layers[index], self.dev, self.config
        heads, packed = (config.num_heads, config.num_kv_heads), self._packed(d_qkv)
        abs_max = self.operands.abs_max(index, "d_qkv")
        last = self.rope_table is not None and not config.qk_norm
        if self.rope_table is not None:
            rope.backward(dev, packed, self.rope_table, *heads, abs_max=abs_max if last else None)
        if config.qk_norm:
            raw = a["qk_raw"].view(self.B, self.T, sum(heads), config.head_dim)
            args = (raw, layer.kept["qk_rstd"], w["q_norm"], w["k_norm"], *heads)
            qk_norm.backward(dev, packed, g["q_norm"], g["k_norm"], *args)
        if not last:
            self.operands.measure(index, "d_qkv", d_qkv)
