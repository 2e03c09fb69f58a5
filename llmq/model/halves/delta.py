"""Linear attention over a state in a transformer block: gated delta nets, and Mamba-2.

    x -> NAME_in -> q, k, v -> short convolution -> rule -> gated norm -> NAME_o -> out
                 -> b, a -> betas and decays --------^           ^
                 -> z -------------------------------------------+

A row of NAME_in's product is (q, k, v, z, b, a), and lacks b in Mamba-2; NAME is delta or mamba.
The object `operands` makes an operand of products from a tensor. States are F32, and 0 at the
beginning of a document.

Ranks that divide sequences exchange tokens for heads after NAME_in, and exchange back before NAME_o
(`HeadExchange`): between the two products, rows are the B*T tokens of whole sequences. The sizes
below count only the rank's heads. A norm of Mamba-2 is over all heads of a key head. If ranks
divide these heads, the norm and z stay with a rank's tokens, and the vectors that queries read from
the states are exchanged back before the norm.
"""

from contextlib import ExitStack, nullcontext
from functools import partial
from typing import NamedTuple

from llmq.arch.head_shares import head_shares
from llmq.base.dtypes import F32
from llmq.base.operand import Operand
from llmq.base.tensor import Accumulator, Tensor
from llmq.formats.operands import Activation
from llmq.model.activations import HalfLayer, LayerContext, Recompute, scratch_like
from llmq.model.halves.half import ModelContext
from llmq.model.head_exchange import HeadColumns, HeadExchange
from llmq.model.parameters import PartGrads, PartWeights
from llmq.ops.delta import delta_gates, delta_rule, gated_norm, short_conv, ssd
from llmq.ops.delta.delta_rule import Heads
from llmq.ops.pointwise.elementwise import copy_columns

MULTIPLE = 8  # divisor of the product's columns, for copies of 8 elements at a time


class _Saved(NamedTuple):
    """The tensors of one layer that backward reads. product: (rows, features of NAME_in). conv:
    (rows, 2K + V), output of the convolution. gates: F32 (B, T, 2, Hv), decays and betas of each
    value head. state: (rows, V), the vectors that queries read from the states. gated: (rows, V),
    output of the gated norm, never kept. z: (tokens, V of all ranks) if norms stay with tokens,
    where gated has this shape, too; else None."""

    product: Activation
    conv: Activation
    gates: Tensor
    state: Activation
    gated: Activation
    z: Activation | None


class _Tensors(NamedTuple):
    """The tensors of one pass, named as in _Saved. product: (rows, features of NAME_in). conv:
    (rows, 2K + V). state: (rows, V). z: (tokens, V of all ranks), or None."""

    product: Tensor
    conv: Tensor
    state: Tensor
    z: Tensor | None


class DeltaHalf:
    """The delta nets of all layers. Scratch lives as long as `temps`. A subclass computes another
    rule for the state. name: prefix of the names of weights and tensors. gate_parts: the number of
    gates, an argument of delta_gates. gate_first: True if the gate precedes the norm, an argument
    of gated_norm. norms_key_heads: True if a norm is over all value heads of a key head."""

    name, rule, gate_parts, gate_first, norms_key_heads = "delta", delta_rule, 2, False, False

    def __init__(self, shared: ModelContext):
        sizes, batch = shared.config.mixers, shared.options.batch
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.norms = shared.norms
        self.B, self.T, self.parts = batch.batch_size, batch.seq_len, batch.context_parallel
        self.starts, self.exchange = shared.inputs.first_key, HeadExchange(shared.dev, batch)
        self.eps = shared.config.norm_eps
        shares = head_shares(sizes.value_heads, sizes.key_heads, self.parts)
        own = (len(shares.keys[0]), len(shares.queries[0]))
        self.heads = Heads(*own, sizes.key_dim, sizes.value_dim)
        self.channels, self.values = self.heads.channels, self.heads.Hv * self.heads.DV
        self.normed = sizes.values // sizes.key_heads  # channels of a norm over key heads
        of_keys = HeadColumns(sizes.key_heads, sizes.key_dim, shares.keys)
        of_out = HeadColumns(sizes.value_heads, sizes.value_dim, shares.queries)
        of_conv, of_heads, of_z = [of_keys, of_keys, of_out], [of_out._replace(width=1)], of_out
        self.of_out, self.vectors = [of_out], {"conv": of_conv, "conv_bias": of_conv}
        self.vectors |= dict.fromkeys(("a_log", "dt_bias", "skip"), of_heads)
        # Number of z's columns, and the first, in rows of tokens if norms stay with tokens.
        self.z_columns: tuple[int, int] | None = None
        if self.norms_key_heads and shares.copies > 1:
            self.z_columns = (sizes.values, sizes.channels)
            of_z = of_out._replace(of=((),) * self.parts)
        elif self.norms_key_heads:
            self.vectors["mamba_norm"] = self.of_out
        self.of_product = [*of_conv, of_z, *of_heads * self.gate_parts]
        # The first columns of z, and of b and a, in the product.
        self.of_gate = self.channels
        first = self.channels + self.exchange.width([of_z])
        if unused := -self.exchange.width(self.of_product) % MULTIPLE if self.parts > 1 else 0:
            self.of_product.append(HeadColumns(0, 1, ((None,) * unused,) * self.parts))
        # Arguments of delta_gates: the first column, the number of gates, the least step.
        self.of_gates = (first, self.gate_parts, sizes.least_step)
        self.in_, self.o, self.norm = (f"{self.name}_{key}" for key in ("in", "o", "norm"))

    def keeps_input(self, recompute: Recompute) -> bool:
        """Return False also if backward repeats a product of codes, as in attention."""
        again = recompute.qkv if self.operands.makes_codes else recompute.att
        return not (recompute.norm or again)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        keys = {self.in_: recompute.qkv, self.o: recompute.block}
        return tuple(key for key, again in keys.items() if again)

    def keep(self, layer: HalfLayer) -> _Saved:
        r, name = layer.recompute, self.name
        of_rows, of_norm, z = partial(layer.activation, per_row=self.parts), self.values, None
        gated = of_rows
        if self.z_columns is not None:
            gated, of_norm = layer.activation, self.z_columns[0]
            z = gated(f"{name}_z", of_norm, kept=not r.qkv)
        return _Saved(
            product=of_rows(self.in_, self.exchange.width(self.of_product), kept=not r.qkv),
            conv=of_rows(f"{name}_conv", self.channels, kept=not (r.qkv or r.att)),
            gates=layer.alloc(f"{name}_gates", self.B, self.T, 2, self.heads.Hv, dtype=F32),
            state=of_rows(f"{name}_state", self.values, kept=not r.att),
            gated=gated(f"{name}_gated", of_norm, kept=False),
            z=z,
        )

    def _by_token(self, tensor: Tensor) -> Tensor:
        """Return a view of (rows, n) as (B, T, n)."""
        return tensor.view(self.B, self.T, tensor.shape[1])

    def _tensors(self, temps: ExitStack, layer: HalfLayer) -> _Tensors:
        """Return the tensors kept for backward, or scratch of `temps`."""
        kept = (layer.saved.product, layer.saved.conv, layer.saved.state, layer.saved.z)
        return _Tensors(*(activation and activation.place(self.dev, temps) for activation in kept))

    def _own_weights(self, temps: ExitStack, ctx: LayerContext) -> LayerContext:
        """Return ctx with those rows of the weight vectors that belong to this rank's heads."""
        of_heads = self.vectors.items()
        own = {k: self.exchange.own_rows(temps, ctx.w[k], h) for k, h in of_heads if k in ctx.w}
        return ctx._replace(w=PartWeights(ctx.w | own))

    def _own_gradients(self, temps: ExitStack, ctx: LayerContext) -> LayerContext:
        """Return ctx with gradients of the weight vectors' rows for this rank's heads; the
        gradients are complete at the end of `temps`."""
        of_heads = self.vectors.items()
        own = {k: self.exchange.own_gradient(ctx.g[k], h) for k, h in of_heads if k in ctx.g}
        entered = {key: temps.enter_context(gradient) for key, gradient in own.items()}
        return ctx._replace(g=PartGrads(ctx.g | entered))

    def of_rule(self, w: PartWeights) -> tuple[Tensor, ...]:
        """Return the arguments that the rule's operation takes between gates and heads."""
        return ()

    def gradients_of_rule(self, g: PartGrads) -> tuple[Accumulator | None, ...]:
        """Return the gradients of the arguments that `of_rule` returns."""
        return ()

    def norm_weight(self, w: PartWeights) -> Tensor:
        """Return the norm's weight: (1, Hd), or a row for each head of the norm."""
        return w[self.norm].view(1, self.heads.DV)

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        tensors, ctx = self._tensors(ctx.temps, ctx.layer), self._own_weights(ctx.temps, ctx)
        self._multiply(ctx, tensors, x)
        self._convolve(ctx, tensors)
        self._read_states(ctx, tensors)
        gated = self._gated(ctx, tensors)
        name, (out, addend) = ctx.layer.saved.gated.tensor_id, ctx.layer.out
        x = self.operands.quantize(ctx.temps, name, gated, measured=False, transposed=False)
        self.linear.forward(ctx, self.o, out, x, addend)

    def _multiply(self, ctx: LayerContext, tensors: _Tensors, x: Operand) -> None:
        """Compute NAME_in's product."""
        with self.exchange.to_heads(tensors.product, self.of_product) as of_tokens:
            self.linear.forward(ctx, self.in_, of_tokens, x)
            if self.z_columns is not None:
                count, first = self.z_columns
                copy_columns(self.dev, tensors.z, of_tokens, count, (0, first))

    def _convolve(self, ctx: LayerContext, tensors: _Tensors) -> None:
        """Compute queries, keys and values with the short convolution, and the gates."""
        layer, w = ctx.layer, ctx.w
        starts, before = self.starts, None
        if layer.cache is not None:  # the state is 0 at the beginning of a text
            starts, before = None, layer.cache["before"]
        out, x = self._by_token(tensors.conv), self._by_token(tensors.product)
        short_conv.forward(self.dev, out, x, w["conv"], starts, before, bias=w.bias("conv"))
        gates = (w["a_log"], w["dt_bias"], *self.of_gates)
        delta_gates.forward(self.dev, layer.saved.gates, tensors.product, *gates)

    def _read_states(self, ctx: LayerContext, tensors: _Tensors) -> None:
        out, qkv, layer = self._by_token(tensors.state), self._by_token(tensors.conv), ctx.layer
        inputs = (qkv, layer.saved.gates, *self.of_rule(ctx.w), self.heads)
        if layer.cache is None:
            self.rule.forward(self.dev, out, *inputs, self.starts)
        elif self.T <= delta_rule.FEW_TOKENS:
            self.rule.recurrence(self.dev, out, layer.cache["state"], *inputs)
        else:
            self.rule.forward(self.dev, out, *inputs, state=layer.cache["state"])

    def _gated(self, ctx: LayerContext, tensors: _Tensors) -> Tensor:
        """Return the output product's input for this rank's tokens, (tokens, V of all ranks)."""
        out = ctx.layer.saved.gated.place(self.dev, ctx.temps)
        if self.z_columns is not None:
            state = self.exchange.to_tokens(ctx.temps, tensors.state, self.of_out)
            weight = self.norm_weight(ctx.w)
            gated_norm.forward(
                self.dev, out, state, tensors.z, weight, self.eps, 0, gate_first=self.gate_first
            )
            return out
        gated_norm.forward(
            self.dev, out, tensors.state, tensors.product, self.norm_weight(ctx.w), self.eps,
            self.of_gate, gate_first=self.gate_first,
        )  # fmt: skip
        return self.exchange.to_tokens(ctx.temps, out, self.of_out)

    # -- backward --------------------------------------------------------------------------------

    def recompute(self, ctx: LayerContext) -> tuple[Operand | None, _Tensors, Operand | None]:
        """Return x (rows, C), the tensors of the pass, and `gated` as the output product's operand.
        x and the operand are None if no gradient needs either."""
        r, tensors = ctx.layer.recompute, self._tensors(ctx.temps, ctx.layer)
        ctx = self._own_weights(ctx.temps, ctx)
        x = o_input = None
        if r.qkv or self.linear.needs_input(ctx, self.in_):
            x = self.norms.recompute(ctx, product=r.qkv)
        if r.qkv:
            self._multiply(ctx, tensors, x)
        if r.qkv or r.att:
            self._convolve(ctx, tensors)
        if r.att:
            self._read_states(ctx, tensors)
        if r.block or self.linear.needs_input(ctx, self.o):
            gated, name = self._gated(ctx, tensors), ctx.layer.saved.gated.tensor_id
            o_input = self.operands.quantize_again(ctx.temps, name, gated, product=r.block)
        if r.block:
            out, addend = ctx.layer.out
            self.linear.forward(ctx, self.o, out, o_input, addend)
        return x, tensors, o_input

    def backward(
        self, ctx: LayerContext, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        dev, name, (x, tensors, o_input) = self.dev, self.name, inputs
        with ExitStack() as temps:
            d_in = d_state = d_gated = d_z = None
            if inside:
                ctx = self._own_weights(temps, ctx)
                d_in = scratch_like(dev, temps, f"d_{name}_in", tensors.product)
            if inside and tensors.z is not None:
                d_z = scratch_like(dev, temps, f"d_{name}_z", tensors.z)
            with ExitStack() as inner:
                if inside:
                    ctx = self._own_gradients(inner, ctx)
                    d_state = scratch_like(dev, inner, f"d_{name}_state", tensors.state)
                with ExitStack() as first:
                    if inside:
                        like = tensors.state if tensors.z is None else tensors.z
                        d_gated = scratch_like(dev, first, f"d_{name}_gated", like)
                    with ExitStack() as of_output:
                        d_o = self.operands.quantize(
                            of_output, ctx.layer.out_id, d_out, measured=True, transposed=True
                        )
                        if tensors.z is None:
                            of_norm = self.exchange.to_heads(d_gated, self.of_out)
                        else:
                            of_norm = nullcontext(d_gated)
                        with of_norm as of_tokens:
                            self.linear.input_gradient(ctx, self.o, of_tokens, d_o)
                        self.linear.weight_gradients(ctx, self.o, d_o, o_input)
                    if not inside:
                        return
                    self._back_through_norm(ctx, tensors, (d_state, d_in, d_z), d_gated)
                self._back_through_states(ctx, inner, tensors, d_in, d_state)
            d_in = self.exchange.to_tokens(temps, d_in, self.of_product)
            if self.z_columns is not None:
                count, at = self.z_columns
                copy_columns(dev, d_in, d_z, count, (at, 0))
            d_product = self.operands.quantize(
                temps, ctx.layer.id_of(f"d_{name}_in"), d_in, measured=False, transposed=True
            )
            self.linear.input_gradient(ctx, self.in_, d_x, d_product)
            self.linear.weight_gradients(ctx, self.in_, d_product, x)

    def _back_through_norm(
        self, ctx: LayerContext, tensors: _Tensors, to: tuple[Tensor, ...], d_gated: Tensor
    ) -> None:
        """to: gradients of states, of the product, whose columns of z are computed, and of z if
        norms stay with tokens."""
        (d_state, d_in, d_z), d_weight = to, ctx.g.get(self.norm)
        backward = partial(gated_norm.backward, self.dev, gate_first=self.gate_first)
        weight, eps, product = self.norm_weight(ctx.w), self.eps, tensors.product
        if d_z is None:
            x = (tensors.state, product, weight, eps, self.of_gate)
            backward(d_state, d_in, d_weight, d_gated, *x)
            return
        with ExitStack() as temps:
            state = self.exchange.to_tokens(temps, tensors.state, self.of_out)
            with self.exchange.to_heads(d_state, self.of_out) as of_tokens:
                backward(of_tokens, d_z, d_weight, d_gated, state, tensors.z, weight, eps, 0)

    def _back_through_states(
        self, ctx: LayerContext, temps: ExitStack, tensors: _Tensors, d_in: Tensor, d_state: Tensor
    ) -> None:
        """Compute the columns of d_in for queries, keys, values and gates, and the gradients of the
        weights between NAME_in and the states."""
        dev, w, g, gates = self.dev, ctx.w, ctx.g, ctx.layer.saved.gates
        d_conv = scratch_like(dev, temps, f"d_{self.name}_conv", tensors.conv)
        with ExitStack() as second:
            d_gates = scratch_like(dev, second, f"d_{self.name}_gates", gates)
            self.rule.backward(
                dev, self._by_token(d_conv), d_gates, *self.gradients_of_rule(g),
                self._by_token(d_state), self._by_token(tensors.conv), gates, *self.of_rule(w),
                self.heads, self.starts,
            )  # fmt: skip
            delta_gates.backward(
                dev, d_in, g.get("a_log"), g.get("dt_bias"), d_gates, gates, tensors.product,
                w["a_log"], w["dt_bias"], *self.of_gates,
            )  # fmt: skip
        short_conv.backward(
            dev, self._by_token(d_in), g.get("conv"), self._by_token(d_conv),
            self._by_token(tensors.product), w["conv"], self.starts, bias=w.bias("conv"),
            d_bias=g.bias("conv"),
        )  # fmt: skip


class MambaHalf(DeltaHalf):
    """The state spaces of all layers (Mamba-2), in which C, B and x are queries, keys and
    values."""

    name, rule, gate_parts, gate_first, norms_key_heads = "mamba", ssd, 1, True, True

    def of_rule(self, w: PartWeights) -> tuple[Tensor, ...]:
        return (w["skip"],)

    def gradients_of_rule(self, g: PartGrads) -> tuple[Accumulator | None, ...]:
        return (g.get("skip"),)

    def norm_weight(self, w: PartWeights) -> Tensor:
        weight = w[self.norm]
        return weight.view(weight.size // self.normed, self.normed)
