"""One transformer block: forward, recompute, backward.

    residual[l] -> ln1 -> qkv (-> qk_norm) -> rope -> attention -> o  --+--> residual_att
                                                     residual[l] ------+
    residual_att -> ln2 -> up -> swiglu|gelu -> down --+--> residual[l+1]
                                     residual_att -----+

Both additions happen inside the norm that follows: the second one in the next block's ln1 or in
the head's norm, which is why a block's output stays split into `residual_att` and `branch`.
Activations are (rows, features), rows = B*T.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import ModuleType

from llmq.base.dtypes import F32
from llmq.base.operand import Operand, Target
from llmq.base.tensor import Accumulator, Tensor
from llmq.config.model import ModelConfig
from llmq.model import linear, norm
from llmq.model.activations import Layer, Recompute
from llmq.model.linear import EXACT
from llmq.model.operands import FAST, Making, Operands, slot
from llmq.model.residuals import Residuals
from llmq.ops import attention, gelu, qk_norm, rope, swiglu
from llmq.runtime.device import Device


class Blocks:
    """All blocks of a model: they share code, and the buffers between blocks."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        residuals: Residuals,
        operands: Operands,
        recompute: Recompute,
        B: int,
        T: int,
        *,
        attention_backend: str,
        attention_chunks: int,
    ):
        """Allocates every activation of B sequences of T tokens."""
        self.dev, self.config, self.operands, self.B, self.T = dev, config, operands, B, T
        self.rows, self.dtype = operands.rows, operands.dtype
        fp8 = operands.fp8
        self.fast = EXACT if fp8 is None else FAST[fp8.fast][0]
        self.backend, self.chunks = attention_backend, attention_chunks
        shape = (self.rows, config.hidden_size)
        kinds = recompute.of_layers(config.num_layers)
        shared = (
            dev.alloc("residual_att", shape, self.dtype, "Activations")
            if any(kind.block for kind in kinds)
            else None
        )
        self.branch = dev.alloc("branch", shape, self.dtype, "Activations")
        codes = None if fp8 is None else fp8.value
        self.layers = [
            Layer(dev, config, index, kind, residuals.tensors[index], shared, codes, B, T)
            for index, kind in enumerate(kinds)
        ]
        self.rope_table: Tensor | None = None
        if config.positions == "rope":
            table = rope.make_table(T, config.head_dim, config.rope_theta, config.rope_scaling)
            self.rope_table = dev.alloc("rope_table", table.shape, F32, "Activations")
            dev.upload(self.rope_table, table)

    def _enter(self, temps: ExitStack, index: int, *names: str) -> dict[str, Tensor]:
        """The named activations of a layer: kept ones, and scratch for those that are not."""
        kept = self.layers[index].kept
        return {n: kept[n] if n in kept else self._scratch(temps, index, n) for n in names}

    def _scratch(self, temps: ExitStack, index: int, name: str) -> Tensor:
        shape = (self.rows, self.layers[index].table[name].features)
        return temps.enter_context(self.dev.scratch(name, shape, self.dtype))

    def _qkv_names(self) -> tuple[str, ...]:
        return ("qkv", "qk_raw") if self.config.qk_norm else ("qkv",)

    @property
    def _heads(self) -> tuple[int, int]:
        return self.config.num_heads, self.config.num_kv_heads

    def _packed(self, qkv: Tensor) -> Tensor:
        heads = self.config.num_heads + 2 * self.config.num_kv_heads
        return qkv.view(self.B, self.T, heads, self.config.head_dim)

    def _by_head(self, att: Tensor) -> Tensor:
        return att.view(self.B, self.T, self.config.num_heads, self.config.head_dim)

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, index: int, w: dict[str, Operand]) -> None:
        """residual[l] (or, for l > 0, residual_att[l-1] + branch) -> residual_att[l], branch."""
        layer, dev, config = self.layers[index], self.dev, self.config
        with ExitStack() as temps:
            with self._making(temps, index, "ln1") as ln1:
                if index == 0:
                    args = (ln1.target, layer.ln1_stats, layer.residual)
                    norm.forward(dev, config, w, "ln1", *args)
                else:
                    before = self.layers[index - 1].residual_att
                    args = (layer.residual, ln1.target, layer.ln1_stats, before, self.branch)
                    norm.forward_residual(dev, config, w, "ln1", *args)
            a = self._enter(temps, index, *self._qkv_names(), "att")
            self._qkv(layer, a, ln1.operand, w)
            self._attention(layer, a)
            name = slot(index, "att")
            att = self.operands.quantized(temps, name, a["att"], transposed=False)
            self._product(self.branch, att, w, "o")
        with ExitStack() as temps:
            with self._making(temps, index, "ln2") as ln2:
                args = (layer.residual_att, ln2.target, layer.ln2_stats, layer.residual)
                norm.forward_residual(dev, config, w, "ln2", *args, self.branch)
            mlp_up = self._enter(temps, index, "mlp_up")["mlp_up"]
            self._product(mlp_up, ln2.operand, w, "up")
            with self._making(temps, index, "mlp_act") as mlp_act:
                self._activate(mlp_act.target, mlp_up)
            self._product(self.branch, mlp_act.operand, w, "down")

    def _making(self, temps: ExitStack, index: int, name: str) -> AbstractContextManager[Making]:
        """A forward product's input; what the layer's table says is kept of it."""
        layer = self.layers[index]
        features, out = layer.table[name].features, layer.kept.get(name)
        codes = layer.codes.get(name)
        return self.operands.making(temps, slot(index, name), features, out=out, kept=codes)

    def _product(self, out: Tensor, x: Operand, w: dict[str, Operand], key: str) -> None:
        bias = w.get(f"{key}_bias")
        linear.forward(self.dev, out, x, w[key], bias, fast=self.fast.forward)

    def _qkv(self, layer: Layer, a: dict[str, Tensor], x: Operand, w: dict[str, Operand]) -> None:
        dev, config = self.dev, self.config
        self._product(a["qkv"], x, w, "qkv")
        qkv = self._packed(a["qkv"])
        if config.qk_norm:
            raw = a["qk_raw"].view(self.B, self.T, sum(self._heads), config.head_dim)
            args = (raw, layer.kept["qk_rstd"], w["q_norm"], w["k_norm"], config.norm_eps)
            qk_norm.forward(dev, qkv, *args, *self._heads)
        if self.rope_table is not None:
            rope.forward(dev, qkv, self.rope_table, *self._heads)

    def _attention(self, layer: Layer, a: dict[str, Tensor]) -> None:
        out, qkv = self._by_head(a["att"]), self._packed(a["qkv"])
        attention.forward(self.dev, out, layer.lse, qkv, *self._heads, backend=self.backend)

    @property
    def _activation(self) -> ModuleType:
        return swiglu if self.config.activation == "swiglu" else gelu

    def _activate(self, to: Target, mlp_up: Tensor) -> None:
        self._activation.forward(self.dev, to.out, mlp_up, abs_max=to.abs_max, fp8=to.fp8)

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
        again first; scales are those of the forward pass.
        """
        layer, operands = self.layers[index], self.operands
        again = {"name": slot(index, "att"), "again": True}
        with ExitStack() as temps:
            if layer.recompute.block:  # residual_att is needed first, and needs the attention
                a, x = self._attention_again(index, w, temps)
                x_att = operands.quantized(temps, x=a["att"], **again)
                self._product(self.branch, x_att, w, "o")
            self._backward_mlp(index, w, g, d_residual, d_norm)
            if not layer.recompute.block:
                a, x = self._attention_again(index, w, temps)
                x_att = operands.quantized(temps, x=a["att"], codes=False, **again)
            self._backward_attention(index, a, x, x_att, w, g, d_residual, d_norm)
        to = Target(d_residual)
        if index > 0:
            to = operands.passing(slot(index - 1, "d_mlp"), d_residual)
        args = (to, d_norm, layer.residual, layer.ln1_stats, d_residual)
        norm.backward(self.dev, w, g, "ln1", *args)

    def _kept(self, index: int, name: str) -> Operand | None:
        """A forward product's input, if it was kept."""
        layer = self.layers[index]
        if name in layer.codes:
            return self.operands.kept(slot(index, name), layer.codes[name])
        return layer.kept.get(name)

    def _making_again(
        self,
        temps: ExitStack,
        index: int,
        name: str,
        *,
        product: bool,
        out: Tensor | None = None,
    ) -> AbstractContextManager[Making]:
        """As _making. product: it is computed again too, else only its weight's gradient is."""
        args = (temps, slot(index, name), self.layers[index].table[name].features)
        return self.operands.making(*args, out=out, codes=product, transposed=True, again=True)

    def _norm_again(
        self, index: int, w: dict[str, Operand], temps: ExitStack, key: str, *, product: bool
    ) -> Operand:
        """The output of ln1 or ln2 for backward; product: as in _making_again."""
        layer, config = self.layers[index], self.config
        kept = self._kept(index, key)
        if kept is not None:
            return kept
        with self._making_again(temps, index, key, product=product) as made:
            if key == "ln1":
                args = (made.target, layer.ln1_stats, layer.residual)
                norm.forward(self.dev, config, w, key, *args)
            elif layer.recompute.block:
                args = (layer.residual_att, made.target, layer.ln2_stats, layer.residual)
                norm.forward_residual(self.dev, config, w, key, *args, self.branch)
            else:
                args = (made.target, layer.ln2_stats, layer.residual_att)
                norm.forward(self.dev, config, w, key, *args)
        return made.operand

    def _attention_again(
        self, index: int, w: dict[str, Operand], temps: ExitStack
    ) -> tuple[dict[str, Tensor], Operand]:
        """The attention half's activations, and the input of its qkv product."""
        layer, r = self.layers[index], self.layers[index].recompute
        a = self._enter(temps, index, *self._qkv_names(), "att")
        x = self._norm_again(index, w, temps, "ln1", product=r.qkv)
        if r.qkv:
            self._qkv(layer, a, x, w)
        if r.att:
            self._attention(layer, a)
        return a, x

    def _mlp_again(
        self, index: int, w: dict[str, Operand], temps: ExitStack
    ) -> tuple[Tensor, Operand]:
        """mlp_up, and the input of its product."""
        recompute = self.layers[index].recompute
        mlp_up = self._enter(temps, index, "mlp_up")["mlp_up"]
        x = self._norm_again(index, w, temps, "ln2", product=recompute.ffn)
        if recompute.ffn:
            self._product(mlp_up, x, w, "up")
        return mlp_up, x

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
            mlp_up, x = self._mlp_again(index, w, temps)
            making = operands.making(
                temps,
                slot(index, "d_mlp_up"),
                mlp_up.shape[1],
                out=mlp_up,  # the activation is not needed again
                wanted="up_bias" in g,
                transposed=True,
            )
            with making as d_mlp_up, ExitStack() as inner:
                shape = (self.rows, layer.table["mlp_act"].features)
                d_mlp_act = inner.enter_context(dev.scratch("d_mlp_act", shape, self.dtype))
                d_out = operands.passed(inner, slot(index, "d_mlp"), d_residual)
                linear.input_gradient(dev, d_mlp_act, d_out, w["down"], fast=self.fast.d_x)
                x_act = self._activate_backward(inner, index, d_mlp_up.target, d_mlp_act, mlp_up)
                self._weight_gradients(d_out, x_act, g, "down")
            self._product_backward(d_norm, d_mlp_up.operand, x, w, g, "up")
        to = operands.passing(slot(index, "d_att"), d_residual)
        args = (to, d_norm, layer.residual_att, layer.ln2_stats, d_residual)
        norm.backward(dev, w, g, "ln2", *args)

    def _activate_backward(
        self, temps: ExitStack, index: int, to: Target, d_mlp_act: Tensor, mlp_up: Tensor
    ) -> Operand:
        """Returns the activation, which the same kernel makes again if it was not kept."""
        kept = self._kept(index, "mlp_act")
        args = (self.dev, to.out, d_mlp_act, mlp_up)
        results = {"abs_max": to.abs_max, "fp8": to.fp8}
        if kept is not None:
            self._activation.backward(*args, **results)
            return kept
        in_place = {"product": False, "out": d_mlp_act}  # its gradient is not needed again
        with self._making_again(temps, index, "mlp_act", **in_place) as made:
            again = {"out": made.target.out, "out_fp8": made.target.fp8}
            self._activation.backward(*args, **results, **again)
        return made.operand

    def _product_backward(
        self,
        d_x: Tensor,
        d_out: Operand,
        x: Operand,
        w: dict[str, Operand],
        g: dict[str, Accumulator],
        key: str,
    ) -> None:
        linear.input_gradient(self.dev, d_x, d_out, w[key], fast=self.fast.d_x)
        self._weight_gradients(d_out, x, g, key)

    def _weight_gradients(
        self, d_out: Operand, x: Operand, g: dict[str, Accumulator], key: str
    ) -> None:
        grads = (g[key], g.get(f"{key}_bias"))
        linear.weight_gradients(self.dev, *grads, d_out, x, fast=self.fast.d_weight)

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
        layer, dev = self.layers[index], self.dev
        with ExitStack() as temps:
            d_qkv = temps.enter_context(dev.scratch("d_qkv", a["qkv"].shape, self.dtype))
            with ExitStack() as inner:
                d_att = inner.enter_context(dev.scratch("d_att", a["att"].shape, self.dtype))
                d_out = self.operands.passed(inner, slot(index, "d_att"), d_residual)
                self._product_backward(d_att, d_out, x_att, w, g, "o")
                out, qkv = self._by_head(a["att"]), self._packed(a["qkv"])
                attention.backward(
                    dev, self._packed(d_qkv), self._by_head(d_att), out, layer.lse, qkv,
                    *self._heads, chunks=self.chunks, backend=self.backend,
                )  # fmt: skip
            d_out, g = self._backward_positions(temps, index, a, w, g, d_qkv)
            self._product_backward(d_norm, d_out, x, w, g, "qkv")

    def _backward_positions(
        self,
        temps: ExitStack,
        index: int,
        a: dict[str, Tensor],
        w: dict[str, Operand],
        g: dict[str, Accumulator],
        d_qkv: Tensor,
    ) -> tuple[Operand, dict[str, Accumulator]]:
        """RoPE and the q and k norms backward, of d_qkv as attention has made it.

        Returns the output gradient of the qkv product, and the gradients that are left to do.
        """
        layer, dev, config = self.layers[index], self.dev, self.config
        name, packed, heads = slot(index, "d_qkv"), self._packed(d_qkv), self._heads
        if self.rope_table is not None and not config.qk_norm:
            with self.operands.making(
                temps, name, d_qkv.shape[1], out=d_qkv, transposed=True
            ) as made:
                results = {"abs_max": made.target.abs_max, "fp8": made.target.fp8}
                results["d_bias"] = g.get("qkv_bias")
                rope.backward(dev, packed, self.rope_table, *heads, **results)
            return made.operand, {key: grad for key, grad in g.items() if key != "qkv_bias"}
        if self.rope_table is not None:
            rope.backward(dev, packed, self.rope_table, *heads)
        if config.qk_norm:
            raw = a["qk_raw"].view(self.B, self.T, sum(heads), config.head_dim)
            args = (raw, layer.kept["qk_rstd"], w["q_norm"], w["k_norm"], *heads)
            qk_norm.backward(dev, packed, g["q_norm"], g["k_norm"], *args)
        return self.operands.quantized(temps, name, d_qkv), g
