"""Attention in a transformer block, from the norm of the input to the addition to the residual
stream.

    x -> qkv (-> norms of values, queries and keys) (-> rope) -> attention (-> sinks)
      (-> times sigmoid of gate) -> o -> out

With gates, the qkv product has a gate's channels after each query head; the product is scratch, and
heads and gates are kept in separate tensors. If values are copied from keys, the product has no
values, and is also scratch. The object `operands` makes an operand of products from a tensor: fp8
codes and a scale, or the tensor. Heads are contiguous in a row: (rows, Q) is (B, T, Hq + 2 Hkv,
Hd), query heads, key heads, value heads. Layers may differ in their heads
(`HalfSpec.sizes["heads"]`). A layer that reads keys and values of an earlier layer
(`HalfSpec.reads`) computes only queries, in scratch; the earlier layer copies its keys and values
for later layers, and adds up the later layers' gradients.

Ranks that divide sequences exchange tokens for heads after the qkv product, and exchange back
before the o product (`HeadExchange`): between the two products, rows are the B*T tokens of whole
sequences, with a rank's heads.
"""

from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.formats.operands import Activation
from llmq.model.activations import HalfLayer, LayerContext, Recompute, Rotary, scratch_like
from llmq.model.halves.half import ModelContext
from llmq.model.head_exchange import HeadColumns, HeadExchange
from llmq.ops.attention import (
    attention,
    attention_backward,
    attention_gate,
    paged,
    qk_norm,
    rope,
    value_norm,
)
from llmq.ops.attention.attention import AttentionMask
from llmq.ops.pointwise.elementwise import copy_columns
from llmq.runtime.attention_parts import sees_all_before
from llmq.runtime.device import Device

# By the largest head size, a share of visible pairs of query and key: below this share our backward
# is faster than cuDNN's. A window does not shorten cuDNN's time; our time is a + b * share
# (docs/decisions/kernels.md; measured at T = 1024: h100_attention.txt). Masked tiles at the
# window's edges slow cuDNN down, but less so in longer sequences: the shares here are break-even
# points at T = 8192, which are lower than at T = 1024.
NATIVE_BACKWARD = {64: 0.9, 128: 0.45}
MEASURED = 90  # 10 * compute capability of cards that were measured and need no timing


def directions(
    backend: str, head_dim: int, seq_len: int, window: int | None, capability: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the possible backends of forward, and of backward; Device.choose measures several
    backends. Each forward backend works with each backward backend.

    backend: "native" or "cudnn" in both directions, or "auto", which uses cuDNN if cuDNN supports
    the case. "auto" prefers native for backward of whole sequences on Hopper, and for backward with
    a window that hides enough. On cards that were not measured, native is timed as well. window:
    number of positions that a query attends to, its own included; None: all positions. capability:
    compute capability times 10.
    """
    if backend != "auto":
        return (backend,), (backend,)
    library = ("cudnn",) if capability == MEASURED else ("cudnn", "native")
    whole = sees_all_before(window, seq_len)
    if whole and attention_backward.is_supported(capability, seq_len, head_dim):
        return library, ("native",)
    limit = next((share for size, share in NATIVE_BACKWARD.items() if head_dim <= size), 0.0)
    seen = AttentionMask(window=min(window or seq_len, seq_len)).pairs(seq_len) / seq_len**2
    return library, ("native",) if seen < limit else library


def rope_tables(dev: Device, config: ModelConfig, positions: int) -> list[Rotary | None]:
    """Return the Rotary of each layer, with `positions` rows; None for layers without RoPE. Layers
    with the same angles share a table."""
    tables: dict[tuple, Rotary] = {}
    lengths = None
    if config.query_growth is not None:
        first = config.rope_scaling.original_max_positions
        values = rope.query_lengths(positions, config.query_growth, first)
        lengths = dev.constant("query_lengths", values, F32, "Activations")

    def table_of(layer: int) -> Rotary | None:
        angles = config.rope_of(layer)
        if angles is None:
            return None
        key = (config.heads_of(layer).channels, *angles)
        if key not in tables:
            table = rope.make_table(positions, *key)
            name = f"rope_table.{len(tables)}" if tables else "rope_table"
            table = dev.constant(name, table, F32, "Activations")
            tables[key] = Rotary(table, angles.channels, lengths)
        return tables[key]

    return [table_of(layer) for layer in range(config.num_layers)]


class _Shared(NamedTuple):
    """Keys and values of one layer, after norms and RoPE, for later layers, and the sum of the
    later layers' gradients, (rows, 2 * Hkv * Hd) each. last: index of the last layer that reads
    these keys and values."""

    keys: Tensor
    gradient: Tensor
    last: int


class _Saved(NamedTuple):
    """The tensors of one layer that backward reads. qkv: (rows, Q), after qk_norm and RoPE. qk_raw:
    (rows, (Hq+Hkv)*Hd), before qk_norm, and qk_rstd: F32 (B, T, Hq+Hkv), or with wide_qk_norm (B,
    T, 2); None without qk_norm. v_rstd: F32 (B, T, Hkv), None without value_norm. lse: F32 (B, Hq,
    T), the log-sum-exp of each query's scores. att: (rows, Hq*Hd). gate, att_gated: (rows, Hq*Hd),
    None without a gate; att_gated is never kept."""

    qkv: Activation
    qk_raw: Activation | None
    qk_rstd: Tensor | None
    v_rstd: Tensor | None
    lse: Tensor
    att: Activation
    gate: Activation | None
    att_gated: Activation | None

    @property
    def o_input(self) -> Activation:
        """Return the input of the output product."""
        return self.att if self.att_gated is None else self.att_gated


class _Tensors(NamedTuple):
    """The tensors of one pass. qkv: (rows, Q). qk_raw: (B, T, Hq + Hkv, Hd), None without qk_norm.
    att: (rows, Hq * Hd). gate: (rows, Hq * Hd), None without a gate."""

    qkv: Tensor
    qk_raw: Tensor | None
    att: Tensor
    gate: Tensor | None


class AttentionHalf:
    """The attention of all layers. Scratch lives as long as `temps`."""

    def __init__(self, shared: ModelContext):
        config, options = shared.config, shared.options
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.norms = shared.norms
        self.batch, self.exchange = options.batch, HeadExchange(shared.dev, options.batch)
        self.B, self.T = options.batch.batch_size, options.batch.seq_len
        self.eps, self.scale = config.norm_eps, config.attention_scale
        self.softcap = int(config.attention_softcap or 0)
        self.chunks = options.memory.attn_bwd_chunks
        layers, capability = range(config.num_layers), self.dev.spec.capability
        windows = [config.window_of(layer) for layer in layers]
        sizes = [(shared.backend, config.heads_of(layer).channels, self.T) for layer in layers]
        self.backends = [directions(*sizes[i], windows[i], capability) for i in layers]
        self.starts = shared.inputs.first_key
        self.masks = [attention.AttentionMask(self.starts, window) for window in windows]
        self.rope_tables = shared.rope_tables
        self.shared: dict[int, _Shared] = {}
        self.readers = {config.keys_of(i): i for i in layers if config.shares_keys(i)}
        kind = {"wide": config.arch.wide_qk_norm, "offset": config.arch.norm_offset}
        self.qk_norm = partial(qk_norm.forward, once=config.arch.norm_once, **kind)
        self.qk_norm_backward = partial(qk_norm.backward, **kind)

    # -- memory ----------------------------------------------------------------------------------

    def keeps_input(self, recompute: Recompute) -> bool:
        """Return False also if backward repeats a product of codes: that product needs the input's
        row-major codes, for which the input is recomputed."""
        again = recompute.qkv if self.operands.makes_codes else recompute.att
        return not (recompute.norm or again)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        keys = {"qkv": recompute.qkv, "o": recompute.block}
        return tuple(key for key, again in keys.items() if again)

    def keep(self, layer: HalfLayer) -> _Saved:
        spec, r, raw, rstd, v_rstd = layer.spec, layer.recompute, None, None, None
        Hq, Hkv, Hd = self.batch.local_heads(spec.sizes["heads"])
        heads = sum(self._made_heads(layer))
        of_rows = partial(layer.activation, per_row=self.batch.context_parallel)
        if layer.index in self.readers:
            both = (layer.alloc(n, self.B * self.T, 2 * Hkv * Hd) for n in ("keys", "d_keys"))
            self.shared[layer.index] = _Shared(*both, self.readers[layer.index])
        if spec.sizes["value_norm"]:
            v_rstd = layer.alloc("v_rstd", self.B, self.T, Hkv, dtype=F32)
        if spec.sizes["qk_norm"]:
            raw = of_rows("qk_raw", heads * Hd, kept=not r.qkv)
            norms = 2 if spec.sizes["wide_qk_norm"] else heads
            rstd = layer.alloc("qk_rstd", self.B, self.T, norms, dtype=F32)
        features, gate, gated = Hq * Hd, None, None
        if spec.sizes["gated"]:
            gate = of_rows("gate", features, kept=not r.qkv)
            gated = of_rows("att_gated", features, kept=False)
        return _Saved(
            qkv=of_rows("qkv", (Hq + 2 * Hkv) * Hd, kept=not r.qkv),
            qk_raw=raw,
            qk_rstd=rstd,
            v_rstd=v_rstd,
            lse=layer.alloc("lse", self.B, Hq, self.T, dtype=F32),
            att=of_rows("att", features, kept=not r.att),
            gate=gate,
            att_gated=gated,
        )

    def _made_heads(self, layer: HalfLayer) -> tuple[int, int]:
        """Return the numbers of query heads and of key heads that the layer itself computes."""
        query, kv, _ = self.batch.local_heads(layer.spec.sizes["heads"])
        return query, kv if layer.spec.reads is None else 0

    def _queries(self, layer: HalfLayer) -> int:
        """Return the number of the queries' channels in a row."""
        heads = self.batch.local_heads(layer.spec.sizes["heads"])
        return heads.query * heads.channels

    def _out_heads(self, layer: HalfLayer) -> list[HeadColumns]:
        """Return the columns of attention's output, with the heads of all ranks."""
        heads = layer.spec.sizes["heads"]
        return [HeadColumns(heads.query, heads.channels, self.batch.head_shares(heads).queries)]

    def _sinks(self, layer: HalfLayer) -> list[HeadColumns]:
        return [part._replace(width=1) for part in self._out_heads(layer)]

    def _product_heads(self, layer: HalfLayer) -> list[HeadColumns]:
        """Return the columns of the qkv product, with the heads of all ranks."""
        sizes = layer.spec.sizes
        query, kv, channels = sizes["heads"]
        shares = self.batch.head_shares(sizes["heads"])
        keys = 0 if layer.spec.reads is not None else 2 - sizes["keys_as_values"]
        return [
            HeadColumns(query, channels * (1 + sizes["gated"]), shares.queries),
            *[HeadColumns(kv, channels, shares.keys)] * keys,
        ]

    def _by_head(self, layer: HalfLayer, tensor: Tensor) -> Tensor:
        """Return a view of (rows, n * Hd) as (B, T, n, Hd)."""
        Hd = layer.spec.sizes["heads"].channels
        return tensor.view(self.B, self.T, tensor.shape[1] // Hd, Hd)

    def _tensors(self, temps: ExitStack, layer: HalfLayer) -> _Tensors:
        """Return the tensors kept for backward, or scratch of `temps`."""
        qkv, qk_raw, gate = layer.saved.qkv.place(self.dev, temps), None, layer.saved.gate
        if layer.saved.qk_raw is not None:
            qk_raw = self._by_head(layer, layer.saved.qk_raw.place(self.dev, temps))
        att = layer.saved.att.place(self.dev, temps)
        return _Tensors(qkv, qk_raw, att, gate and gate.place(self.dev, temps))

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        tensors = self._tensors(ctx.temps, ctx.layer)
        with ExitStack() as temps:
            product = self._product_memory(temps, ctx, tensors)
            with self.exchange.to_heads(product, self._product_heads(ctx.layer)) as of_tokens:
                self.linear.forward(ctx, "qkv", of_tokens, x)
            self._place_heads(ctx, product, tensors)
        self._attend(ctx, tensors)
        gated, name = self._gated(ctx, tensors), ctx.layer.saved.o_input.tensor_id
        x = self.operands.quantize(ctx.temps, name, gated, measured=False, transposed=False)
        out, addend = ctx.layer.out
        self.linear.forward(ctx, "o", out, x, addend)

    def _product_memory(self, temps: ExitStack, ctx: LayerContext, to: _Tensors) -> Tensor:
        """Return the memory of the qkv product's output: to.qkv (rows, Q), or scratch with the
        gates' channels, without values, or without keys and values."""
        shape = (to.qkv.shape[0], self.exchange.width(self._product_heads(ctx.layer)))
        if shape == to.qkv.shape:
            return to.qkv
        return temps.enter_context(self.dev.scratch("qkv product", shape, to.qkv.dtype))

    def _place_heads(self, ctx: LayerContext, product: Tensor, to: _Tensors) -> None:
        """Compute the heads that attention reads from the qkv product."""
        layer, w, reads = ctx.layer, ctx.w, ctx.layer.spec.reads
        qkv = self._by_head(layer, to.qkv if reads is None else product)
        heads, rstd = self._made_heads(layer), layer.saved.v_rstd
        if to.gate is not None:
            attention_gate.split(self.dev, to.qkv, to.gate, product, *heads)
        if rstd is not None:
            keys = product if layer.spec.sizes["keys_as_values"] else None
            value_norm.forward(self.dev, qkv, rstd, keys, self.eps, *heads)
        if to.qk_raw is not None:
            self.qk_norm(
                self.dev, qkv, to.qk_raw, layer.saved.qk_rstd, w["q_norm"],
                w.get("k_norm", w["q_norm"]), self.eps, *heads,
            )  # fmt: skip
        turn = self.rope_tables[layer.index]
        if turn is not None:
            rope.forward(
                self.dev, qkv, turn.table, *heads, self.starts, turn.channels, turn.lengths
            )
        if reads is not None:
            copy_columns(self.dev, to.qkv, product, product.shape[1], (0, 0))
        if layer.cache is None:
            self._pass_keys(layer, to.qkv)

    def _pass_keys(self, layer: HalfLayer, qkv: Tensor) -> None:
        """Copy keys and values between qkv (rows, Q) and the memory that several layers share."""
        reads, first = layer.spec.reads, self._queries(layer)
        channels = qkv.shape[1] - first
        if reads is not None:
            copy_columns(self.dev, qkv, self.shared[reads].keys, channels, (first, 0))
        elif layer.index in self.shared:
            copy_columns(self.dev, self.shared[layer.index].keys, qkv, channels, (0, first))

    def _attend(self, ctx: LayerContext, tensors: _Tensors) -> None:
        layer, w = ctx.layer, ctx.w
        out, qkv = (self._by_head(layer, t) for t in (tensors.att, tensors.qkv))
        mask, (backend, _) = self.masks[layer.index], self.backends[layer.index]
        heads, lse = self.batch.local_heads(layer.spec.sizes["heads"])[:2], layer.saved.lse
        how = {"scale": self.scale, "softcap": self.softcap}
        attend = partial(attention.forward, **how, backend=backend)
        if layer.cache is not None:
            names = ("k", "v", "table", "lengths", "new")
            cache = [layer.cache[name] for name in names]
            paged.attend(
                self.dev, out, qkv, *cache, *heads, mask.window, w.get("sinks"), **how,
                arrived=layer.cache["arrived"], stores=layer.spec.reads is None,
                scales=layer.cache.get("scales"),
            )  # fmt: skip
        elif "sinks" in w:
            with ExitStack() as temps:
                without = temps.enter_context(self.dev.scratch("lse.without_sinks", lse.shape, F32))
                attend(self.dev, out, without, qkv, *heads, mask)
                sinks = self.exchange.own_rows(temps, w["sinks"], self._sinks(layer))
                attention_gate.sinks_forward(self.dev, out, lse, without, sinks)
        else:
            attend(self.dev, out, lse, qkv, *heads, mask)

    def _gated(self, ctx: LayerContext, tensors: _Tensors) -> Tensor:
        """Return the output product's input for this rank's tokens, (tokens, Hq * Hd)."""
        out = tensors.att
        if tensors.gate is not None:
            out = ctx.layer.saved.att_gated.place(self.dev, ctx.temps)
            attention_gate.forward(self.dev, out, tensors.att, tensors.gate)
        return self.exchange.to_tokens(ctx.temps, out, self._out_heads(ctx.layer))

    # -- backward --------------------------------------------------------------------------------

    def recompute(self, ctx: LayerContext) -> tuple[Operand | None, _Tensors, Operand | None]:
        """Return x (rows, C), the tensors of the pass, and att or att_gated as the output product's
        operand. x and the operand are None if no gradient needs either."""
        r, tensors = ctx.layer.recompute, self._tensors(ctx.temps, ctx.layer)
        x = o_input = None
        if r.qkv or self.linear.needs_input(ctx, "qkv"):
            x = self.norms.recompute(ctx, product=r.qkv)
        if r.qkv:
            with ExitStack() as temps:
                product = self._product_memory(temps, ctx, tensors)
                with self.exchange.to_heads(product, self._product_heads(ctx.layer)) as of_tokens:
                    self.linear.forward(ctx, "qkv", of_tokens, x)
                self._place_heads(ctx, product, tensors)
        if r.att:
            self._attend(ctx, tensors)
        if r.block or self.linear.needs_input(ctx, "o"):
            gated, name = self._gated(ctx, tensors), ctx.layer.saved.o_input.tensor_id
            o_input = self.operands.quantize_again(ctx.temps, name, gated, product=r.block)
        if r.block:
            out, addend = ctx.layer.out
            self.linear.forward(ctx, "o", out, o_input, addend)
        return x, tensors, o_input

    def backward(
        self, ctx: LayerContext, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """inside: True if d_x, or a weight before attention, needs the gradient of queries, keys
        and values."""
        dev, layer, (x, (qkv, qk_raw, att, gate), o_input) = self.dev, ctx.layer, inputs
        with ExitStack() as temps:
            d_qkv = d_gate = d_att = None
            if inside:
                d_qkv = scratch_like(dev, temps, "d_qkv", qkv)
            if inside and gate is not None:
                d_gate = scratch_like(dev, temps, "d_gate", gate)
            with ExitStack() as inner:
                if inside:
                    d_att = scratch_like(dev, inner, "d_att", att)
                with ExitStack() as of_output:
                    d_o = self.operands.quantize(
                        of_output, layer.out_id, d_out, measured=True, transposed=True
                    )
                    with self.exchange.to_heads(d_att, self._out_heads(layer)) as of_tokens:
                        self.linear.input_gradient(ctx, "o", of_tokens, d_o)
                    self.linear.weight_gradients(ctx, "o", d_o, o_input)
                if not inside:
                    return
                if d_gate is not None:
                    attention_gate.backward(dev, d_att, d_gate, d_att, att, gate)
                lse, mask = layer.saved.lse, self.masks[layer.index]
                by_head, *of_out = (self._by_head(layer, t) for t in (qkv, d_att, att))
                if "sinks" in ctx.g:
                    self._sinks_gradient(ctx, *of_out)
                attention.backward(
                    dev, self._by_head(layer, d_qkv), *of_out, lse, by_head,
                    *self.batch.local_heads(layer.spec.sizes["heads"])[:2], self.chunks, mask,
                    scale=self.scale, softcap=self.softcap,
                    backend=self.backends[layer.index][1],
                    kernel=attention_backward.chosen(dev, by_head, mask, self.softcap),
                )  # fmt: skip
            d_product, bias = self._backward_positions(temps, ctx, qkv, qk_raw, d_qkv, d_gate)
            self.linear.input_gradient(ctx, "qkv", d_x, d_product)
            self.linear.weight_gradients(ctx, "qkv", d_product, x, bias=bias)

    def _sinks_gradient(self, ctx: LayerContext, d_out: Tensor, out: Tensor) -> None:
        lse, heads = ctx.layer.saved.lse, self._sinks(ctx.layer)
        with self.exchange.own_gradient(ctx.g["sinks"], heads) as d_sinks, ExitStack() as temps:
            sinks = self.exchange.own_rows(temps, ctx.w["sinks"], heads)
            attention_gate.sinks_backward(self.dev, d_sinks, d_out, out, lse, sinks)

    def _backward_positions(
        self,
        temps: ExitStack,
        ctx: LayerContext,
        qkv: Tensor,
        qk_raw: Tensor | None,
        d_qkv: Tensor,
        d_gate: Tensor | None,
    ) -> tuple[Operand, bool]:
        """Compute backward of RoPE and of the heads' norms, from attention's gradient d_qkv (rows,
        Q). d_gate: (rows, Hq * Hd), gradient of the gates; None without gates. Return the gradient
        of the qkv product, and True if the bias's gradient is still to be computed."""
        layer, w, g = ctx.layer, ctx.w, ctx.g
        d_qkv = self._add_key_gradients(temps, layer, d_qkv)
        by_head, heads = self._by_head(layer, d_qkv), self._made_heads(layer)
        tensor_id, turn = layer.id_of("d_qkv"), self.rope_tables[layer.index]
        rstd, channels = layer.saved.v_rstd, layer.spec.sizes["heads"].channels
        alone = turn is not None and qk_raw is None and d_gate is None and rstd is None
        alone = alone and self.batch.context_parallel == 1
        if alone and rope.fuses(channels, turn.channels):
            out = self.operands.gradient_buffers(temps, tensor_id, d_qkv.shape, d_qkv, both=False)
            rope.backward(
                self.dev, by_head, turn.table, *heads, self.starts,
                channels=turn.channels, lengths=turn.lengths, abs_max=out.abs_max,
                d_bias=g.bias("qkv"), fp8=out.fp8,
            )  # fmt: skip
            return self.operands.finalize(temps, out), False
        if turn is not None:
            rope.backward(
                self.dev, by_head, turn.table, *heads, self.starts,
                channels=turn.channels, lengths=turn.lengths,
            )  # fmt: skip
        if qk_raw is not None:
            self.qk_norm_backward(
                self.dev, by_head, g.get("q_norm"), g.get("k_norm"), qk_raw, layer.saved.qk_rstd,
                w["q_norm"], w.get("k_norm", w["q_norm"]), *heads,
            )  # fmt: skip
        d_product, keys = d_qkv, layer.spec.sizes["keys_as_values"]
        if d_gate is not None or keys:
            shape = (d_qkv.shape[0], self.exchange.width(self._product_heads(layer)))
            d_product = temps.enter_context(self.dev.scratch("d_qkv product", shape, d_qkv.dtype))
        if rstd is not None:
            of_values = (d_product if keys else None, by_head, self._by_head(layer, qkv), rstd)
            value_norm.backward(self.dev, *of_values, *heads)
        if d_gate is not None:
            attention_gate.merge(self.dev, d_product, d_qkv, d_gate, *heads)
        d_product = self.exchange.to_tokens(temps, d_product, self._product_heads(layer))
        d_product = self.operands.quantize(
            temps, tensor_id, d_product, measured=False, transposed=True
        )
        return d_product, True

    def _add_key_gradients(self, temps: ExitStack, layer: HalfLayer, d_qkv: Tensor) -> Tensor:
        """Return the columns of d_qkv (rows, Q) for the heads that the layer itself computes. A
        layer that reads an earlier layer's keys and values adds their gradient to a sum, which the
        earlier layer adds to its own gradient."""
        reads, first = layer.spec.reads, self._queries(layer)
        channels = d_qkv.shape[1] - first
        if reads is None:
            if layer.index in self.shared:
                gradient = self.shared[layer.index].gradient
                copy_columns(self.dev, d_qkv, gradient, channels, (first, 0), add=True)
            return d_qkv
        _, gradient, last = self.shared[reads]
        copy_columns(self.dev, gradient, d_qkv, channels, (0, first), add=layer.index != last)
        scratch = self.dev.scratch("d_queries", (d_qkv.shape[0], first), d_qkv.dtype)
        d_queries = temps.enter_context(scratch)
        copy_columns(self.dev, d_queries, d_qkv, first, (0, 0))
        return d_queries
