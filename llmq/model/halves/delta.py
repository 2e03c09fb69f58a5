"""A gated delta net as a half of a block: linear attention over a state.

    x -> delta_in -> q, k, v -> short convolution -> delta rule -> gated norm -> delta_o -> out
                  -> b, a -> betas and decays ----------^             ^
                  -> z -----------------------------------------------+

A row of delta_in is (q, k, v, z, b, a). `operands` turns a tensor into what products take: with fp8
codes and a scale, without it itself. States begin with 0 where documents do, and lie in F32.
"""

from contextlib import ExitStack
from typing import NamedTuple

from llmq.base.dtypes import F32
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.formats.operands import Activation
from llmq.model.activations import HalfLayer, LayerContext, Recompute, scratch_like
from llmq.model.halves.half import ModelContext
from llmq.ops.delta import delta_gates, delta_rule, gated_norm, short_conv
from llmq.ops.delta.delta_rule import Heads


class _Saved(NamedTuple):
    """The tensors kept of one layer. delta_in: (rows, 2K + 2V + 2 Hv). delta_conv: (rows, 2K + V),
    behind the convolution. gates: F32 (B, T, 2, Hv), of the step, decays and betas. delta_state:
    (rows, V), read from the states. delta_gated: (rows, V), never kept."""

    delta_in: Activation
    delta_conv: Activation
    gates: Tensor
    delta_state: Activation
    delta_gated: Activation


class _Tensors(NamedTuple):
    """delta_in: (rows, 2K + 2V + 2 Hv). delta_conv: (rows, 2K + V). delta_state: (rows, V)."""

    delta_in: Tensor
    delta_conv: Tensor
    delta_state: Tensor


class DeltaHalf:
    """The delta nets of all layers. Scratch lives as long as `temps`."""

    def __init__(self, shared: ModelContext):
        its, batch = shared.config.mixers, shared.options.batch
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.norms = shared.norms
        self.B, self.T = batch.batch_size, batch.local_seq_len
        self.starts = shared.inputs.first_key
        self.eps, self.channels, self.values = shared.config.norm_eps, its.channels, its.values
        self.heads = Heads(its.key_heads, its.value_heads, its.key_dim, its.value_dim)
        self.of_gate = self.channels  # the first column of z in delta_in
        self.of_gates = self.channels + self.values  # and of b and a

    def keeps_input(self, recompute: Recompute) -> bool:
        """Codes that are multiplied again are made of the input again, as attention's are."""
        again = recompute.qkv if self.operands.makes_codes else recompute.att
        return not (recompute.norm or again)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        keys = {"delta_in": recompute.qkv, "delta_o": recompute.block}
        return tuple(key for key, again in keys.items() if again)

    def keep(self, layer: HalfLayer) -> _Saved:
        r = layer.recompute
        return _Saved(
            delta_in=layer.activation("delta_in", layer.spec["delta_in"].shape[0], kept=not r.qkv),
            delta_conv=layer.activation("delta_conv", self.channels, kept=not (r.qkv or r.att)),
            gates=layer.alloc("delta_gates", self.B, self.T, 2, self.heads.Hv, dtype=F32),
            delta_state=layer.activation("delta_state", self.values, kept=not r.att),
            delta_gated=layer.activation("delta_gated", self.values, kept=False),
        )

    def _by_token(self, tensor: Tensor) -> Tensor:
        """(rows, n) as (B, T, n)."""
        return tensor.view(self.B, self.T, tensor.shape[1])

    def _tensors(self, temps: ExitStack, layer: HalfLayer) -> _Tensors:
        """Where they are kept, else scratch."""
        kept = (layer.saved.delta_in, layer.saved.delta_conv, layer.saved.delta_state)
        return _Tensors(*(activation.place(self.dev, temps) for activation in kept))

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        layer, tensors = ctx.layer, self._tensors(ctx.temps, ctx.layer)
        self.linear.forward(ctx, "delta_in", tensors.delta_in, x)
        self._convolve(ctx, tensors)
        self._read_states(layer, tensors)
        gated = self._gated(ctx, tensors)
        name, (out, addend) = layer.saved.delta_gated.tensor_id, layer.out
        x = self.operands.quantize(ctx.temps, name, gated, measured=False, transposed=False)
        self.linear.forward(ctx, "delta_o", out, x, addend)

    def _convolve(self, ctx: LayerContext, tensors: _Tensors) -> None:
        """Queries, keys and values, and the gates."""
        layer, w = ctx.layer, ctx.w
        starts, before = self.starts, None
        if layer.cache is not None:  # where texts begin the state is 0
            starts, before = None, layer.cache["before"]
        out, x = self._by_token(tensors.delta_conv), self._by_token(tensors.delta_in)
        short_conv.forward(self.dev, out, x, w["conv"], starts, before)
        gates = (w["a_log"], w["dt_bias"], self.of_gates)
        delta_gates.forward(self.dev, layer.saved.gates, tensors.delta_in, *gates)

    def _read_states(self, layer: HalfLayer, tensors: _Tensors) -> None:
        out, qkv = self._by_token(tensors.delta_state), self._by_token(tensors.delta_conv)
        gates = layer.saved.gates
        if layer.cache is None:
            delta_rule.forward(self.dev, out, qkv, gates, self.heads, self.starts)
            return
        state = layer.cache["state"]
        if self.T <= delta_rule.FEW_TOKENS:
            delta_rule.recurrence(self.dev, out, state, qkv, gates, self.heads)
        else:
            delta_rule.forward(self.dev, out, qkv, gates, self.heads, state=state)

    def _gated(self, ctx: LayerContext, tensors: _Tensors) -> Tensor:
        out = ctx.layer.saved.delta_gated.place(self.dev, ctx.temps)
        how = (ctx.w["delta_norm"], self.eps, self.of_gate)
        gated_norm.forward(self.dev, out, tensors.delta_state, tensors.delta_in, *how)
        return out

    # -- backward --------------------------------------------------------------------------------

    def recompute(self, ctx: LayerContext) -> tuple[Operand | None, _Tensors, Operand | None]:
        """x (rows, C), and delta_gated as the output product's operand, last; None where no
        gradient needs it."""
        r, tensors = ctx.layer.recompute, self._tensors(ctx.temps, ctx.layer)
        x = o_input = None
        if r.qkv or self.linear.needs_input(ctx, "delta_in"):
            x = self.norms.recompute(ctx, product=r.qkv)
        if r.qkv:
            self.linear.forward(ctx, "delta_in", tensors.delta_in, x)
        if r.qkv or r.att:
            self._convolve(ctx, tensors)
        if r.att:
            self._read_states(ctx.layer, tensors)
        if r.block or self.linear.needs_input(ctx, "delta_o"):
            gated, name = self._gated(ctx, tensors), ctx.layer.saved.delta_gated.tensor_id
            o_input = self.operands.quantize_again(ctx.temps, name, gated, product=r.block)
        if r.block:
            out, addend = ctx.layer.out
            self.linear.forward(ctx, "delta_o", out, o_input, addend)
        return x, tensors, o_input

    def backward(
        self, ctx: LayerContext, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        dev, w, g, gates = self.dev, ctx.w, ctx.g, ctx.layer.saved.gates
        x, (delta_in, conv, state), o_input = inputs
        with ExitStack() as temps:
            d_in = d_state = d_gated = None
            if inside:
                d_in = scratch_like(dev, temps, "d_delta_in", delta_in)
            with ExitStack() as inner:
                if inside:
                    d_state = scratch_like(dev, inner, "d_delta_state", state)
                with ExitStack() as first:
                    if inside:
                        d_gated = scratch_like(dev, first, "d_delta_gated", state)
                    with ExitStack() as of_output:
                        d_o = self.operands.quantize(
                            of_output, ctx.layer.out_id, d_out, measured=True, transposed=True
                        )
                        self.linear.input_gradient(ctx, "delta_o", d_gated, d_o)
                        self.linear.weight_gradients(ctx, "delta_o", d_o, o_input)
                    if not inside:
                        return
                    gated_norm.backward(
                        dev, d_state, d_in, g.get("delta_norm"), d_gated, state, delta_in,
                        w["delta_norm"], self.eps, self.of_gate,
                    )  # fmt: skip
                d_conv = scratch_like(dev, inner, "d_delta_conv", conv)
                with ExitStack() as second:
                    d_gates = scratch_like(dev, second, "d_delta_gates", gates)
                    delta_rule.backward(
                        dev, self._by_token(d_conv), d_gates, self._by_token(d_state),
                        self._by_token(conv), gates, self.heads, self.starts,
                    )  # fmt: skip
                    delta_gates.backward(
                        dev, d_in, g.get("a_log"), g.get("dt_bias"), d_gates, gates, delta_in,
                        w["a_log"], w["dt_bias"], self.of_gates,
                    )  # fmt: skip
                short_conv.backward(
                    dev, self._by_token(d_in), g.get("conv"), self._by_token(d_conv),
                    self._by_token(delta_in), w["conv"], self.starts,
                )  # fmt: skip
            name = ctx.layer.id_of("d_delta_in")
            d_product = self.operands.quantize(temps, name, d_in, measured=False, transposed=True)
            self.linear.input_gradient(ctx, "delta_in", d_x, d_product)
            self.linear.weight_gradients(ctx, "delta_in", d_product, x)
