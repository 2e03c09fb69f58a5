"""Multi-head latent attention in a transformer block, from the norm of the input to the addition to
the residual stream.

    x -> latents -> norm -> q_b  -> queries ------+
                 -> norm -> kv_b -> keys, values -+-> rope -> attention -> o -> out
                 -> key with RoPE ----------------+

Attention's kernels take heads of equal size, so zeros pad the shorter heads. A head of queries or
keys is [P channels with RoPE | N channels without]. Backward recomputes the norms of latents.

Generation caches one row [normed latent (R) | key with RoPE (P)] per token for all heads. The
matrix of a head's keys K multiplies the query, and the matrix of its values V multiplies
attention's output, so that keys and values of single heads are never computed (the absorbed form):

    q . (K c) = (K^T q) . c            sum of p (V c) = V (sum of p c)

The object `operands` makes an operand of products from a tensor. arch/latent.py explains the
letters for sizes.
"""

from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from llmq.arch.latent import NORM_EPS
from llmq.base.dtypes import F32, I32
from llmq.base.operand import Operand, OutBuffers
from llmq.base.tensor import Tensor
from llmq.formats.operands import Activation
from llmq.model.activations import HalfLayer, LayerContext, Recompute, Stats, scratch_like
from llmq.model.halves.attention import directions
from llmq.model.halves.half import ModelContext
from llmq.model.norms import Normalization
from llmq.ops.attention import attention, attention_backward, heads, paged, rope
from llmq.ops.attention.heads import Place
from llmq.ops.experts.grouped import grouped_matmul


class _Saved(NamedTuple):
    """The tensors of one layer that backward reads. latents: (rows, Rq + R + P); without a latent
    for queries, the queries replace the Rq columns. qkv: (rows, 3 H Hd), after RoPE. lse: F32 (B,
    H, T). att: (rows, H V). q_latent: (rows, Rq), None without a latent for queries. kv_latent:
    (rows, R). Both tensors are normed, and are scratch."""

    latents: Activation
    qkv: Activation
    lse: Tensor
    att: Activation
    q_latent: Activation | None
    kv_latent: Activation


class LatentHalf:
    """The latent attention of all layers. Scratch lives as long as `temps`."""

    def __init__(self, shared: ModelContext):
        config, batch = shared.config, shared.options.batch
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.norms, self.norm = shared.norms, Normalization(shared.dev, config, NORM_EPS)
        self.B, self.T, self.rows = batch.batch_size, batch.local_seq_len, batch.micro_tokens
        self.its, self.H, self.Hd = config.latent, config.num_heads, config.head_dim
        self.scale, self.turn = config.latent.scale(config.rope_scaling), shared.rope_tables[0]
        self.chunks = shared.options.memory.attn_bwd_chunks
        capability = self.dev.spec.capability
        self.backends = directions(shared.backend, self.Hd, self.T, None, capability)
        self.starts = shared.inputs.first_key
        self.mask = attention.AttentionMask(self.starts)
        its = self.its
        self.of_latent = its.query_rank or self.H * its.keys  # first column of the latent for keys
        self.columns = self.of_latent + its.rank + its.rotary
        self.head_starts = self.identity = None  # set in passes that continue texts

    # -- memory ----------------------------------------------------------------------------------

    def keeps_input(self, recompute: Recompute) -> bool:
        """Return False also if backward repeats a product of codes, as in attention."""
        again = recompute.qkv if self.operands.makes_codes else recompute.att
        return not (recompute.norm or again)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        again = dict.fromkeys(("latents", "q_b", "kv_b"), recompute.qkv) | {"o": recompute.block}
        return tuple(key for key, value in again.items() if value)

    def keep(self, layer: HalfLayer) -> _Saved:
        its, r, q_latent = self.its, layer.recompute, None
        if its.query_rank is not None:
            q_latent = layer.activation("q_latent", its.query_rank, kept=False)
        if layer.cache is not None and self.identity is None:
            starts = np.arange(self.H + 1, dtype=np.int32) * self.rows
            self.head_starts = self.dev.constant("head_starts", starts, I32, "Activations")
            one = np.eye(its.rank, dtype=self.operands.dtype.numpy)
            self.identity = self.dev.constant("identity", one, self.operands.dtype, "Activations")
        return _Saved(
            latents=layer.activation("latents", self.columns, kept=not r.qkv),
            qkv=layer.activation("qkv", 3 * self.H * self.Hd, kept=not r.qkv),
            lse=layer.alloc("lse", self.B, self.H, self.T, dtype=F32),
            att=layer.activation("att", self.H * its.values, kept=not r.att),
            q_latent=q_latent,
            kv_latent=layer.activation("kv_latent", its.rank, kept=False),
        )

    def _scratch(self, temps: ExitStack, name: str, *shape: int) -> Tensor:
        return temps.enter_context(self.dev.scratch(name, shape, self.operands.dtype))

    def _by_head(self, tensor: Tensor) -> Tensor:
        """Return a view of (rows, n * Hd) as (B, T, n, Hd)."""
        return tensor.view(self.B, self.T, tensor.shape[1] // self.Hd, self.Hd)

    def _copy(self, out: Tensor, to: Place, x: Tensor, of: Place, size: int) -> None:
        heads.copy(self.dev, out, x, self.rows, self.H, size, to, of)

    def _columns(self, out: Tensor, to: int, x: Tensor, of: int, size: int) -> None:
        """Set out[:, to : to + size] = x[:, of : of + size]."""
        places = (Place(first, each.shape[1], 0) for first, each in ((to, out), (of, x)))
        heads.copy(self.dev, out, x, self.rows, 1, size, *places)

    def _packed(self, kind: int, channel: int = 0) -> Place:
        """Return the place of heads in qkv. kind: 0 for queries, 1 for keys, 2 for values. channel:
        the first channel of each head."""
        return Place(kind * self.H * self.Hd + channel, 3 * self.H * self.Hd, self.Hd)

    def _of_kv(self) -> tuple[Place, Place]:
        """Return the places of keys and of values in the product of kv_b."""
        keys, values = self.H * self.its.plain, self.H * self.its.values
        row = keys + values
        return Place(0, row, self.its.plain), Place(keys, row, self.its.values)

    def _first(self, name: str) -> int:
        """Return the column of latents at which "q_latent" or "kv_latent" begins."""
        return 0 if name == "q_latent" else self.of_latent

    def _rotate(self, x: Tensor, queries: int, keys: int) -> None:
        """Apply RoPE in place to x (rows, n * Hd), whose first heads are `queries` query heads,
        then `keys` key heads."""
        rope.forward(
            self.dev, self._by_head(x), self.turn.table, queries, keys, self.starts,
            self.turn.channels,
        )  # fmt: skip

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        saved = ctx.layer.saved
        latents, att = (each.place(self.dev, ctx.temps) for each in (saved.latents, saved.att))
        self.linear.forward(ctx, "latents", latents, x)
        if ctx.layer.cache is None:
            qkv = saved.qkv.place(self.dev, ctx.temps)
            self._expand(ctx, latents, qkv)
            self._attend(ctx, qkv, att)
        else:
            self._attend_to_latents(ctx, latents, att)
        (out, addend), name = ctx.layer.out, saved.att.tensor_id
        x = self.operands.quantize(ctx.temps, name, att, measured=False, transposed=False)
        self.linear.forward(ctx, "o", out, x, addend)

    def _normed(self, ctx: LayerContext, temps: ExitStack, latents: Tensor, name: str) -> Operand:
        """Return the normed latent of queries, "q_latent", or of keys and values, "kv_latent"."""
        out = self.operands.buffers(temps, getattr(ctx.layer.saved, name))
        with ExitStack() as inner:
            self._norm_latent(ctx, inner, latents, name, out)
        return self.operands.finalize(temps, out)

    def _norm_latent(
        self, ctx: LayerContext, temps: ExitStack, latents: Tensor, name: str, out: OutBuffers
    ) -> tuple[Tensor, Stats]:
        """Write the normed latent to `out`. Return the latent (rows, R) before the norm, and the
        norm's statistics, in scratch of `temps`."""
        shape = getattr(ctx.layer.saved, name).shape
        raw = self._scratch(temps, f"{name} raw", *shape)
        self._columns(raw, 0, latents, self._first(name), shape[1])
        rstd = temps.enter_context(self.dev.scratch(f"{name} rstd", (self.rows,), F32))
        stats = Stats(rstd, None)
        self.norm.forward(out, stats, raw, ctx.w[f"{name}_norm"], None)
        return raw, stats

    def _queries(self, ctx: LayerContext, temps: ExitStack, latents: Tensor) -> Tensor:
        """Return a matrix whose rows begin with the queries: H heads of [P | N]."""
        if self.its.query_rank is None:
            return latents
        q = self._scratch(temps, "queries", self.rows, self.H * self.its.keys)
        with ExitStack() as inner:
            self.linear.forward(ctx, "q_b", q, self._normed(ctx, inner, latents, "q_latent"))
        return q

    def _expand(self, ctx: LayerContext, latents: Tensor, qkv: Tensor) -> None:
        """Compute qkv (rows, 3 H Hd) from latents."""
        its = self.its
        if its.keys != its.values:
            self.dev.zero(qkv)
        with ExitStack() as temps:
            q = self._queries(ctx, temps, latents)
            self._copy(qkv, self._packed(0), q, Place(0, q.shape[1], its.keys), its.keys)
        with ExitStack() as temps:
            kv = self._scratch(temps, "keys and values", self.rows, ctx.layer.spec["kv_b"].shape[0])
            with ExitStack() as inner:
                self.linear.forward(ctx, "kv_b", kv, self._normed(ctx, inner, latents, "kv_latent"))
            keys, values = self._of_kv()
            self._copy(qkv, self._packed(1, its.rotary), kv, keys, its.plain)
            self._copy(qkv, self._packed(2), kv, values, its.values)
        shared = Place(self.columns - its.rotary, self.columns, 0)
        self._copy(qkv, self._packed(1), latents, shared, its.rotary)
        self._rotate(qkv, self.H, self.H)

    def _attend(self, ctx: LayerContext, qkv: Tensor, att: Tensor) -> None:
        with ExitStack() as temps:
            out, padded = att, self.its.values != self.Hd
            if padded:
                out = self._scratch(temps, "attention's output", self.rows, self.H * self.Hd)
            attention.forward(
                self.dev, self._by_head(out), ctx.layer.saved.lse, self._by_head(qkv), self.H,
                self.H, self.mask, scale=self.scale, backend=self.backends[0],
            )  # fmt: skip
            if padded:
                places = (_side_by_side(out, self.H), _side_by_side(att, self.H))
                self._copy(att, places[1], out, places[0], self.its.values)

    # -- texts that are continued ------------------------------------------------------------------

    def _attend_to_latents(self, ctx: LayerContext, latents: Tensor, att: Tensor) -> None:
        """Store this pass's rows in the cache, and compute att (rows, H V) from the cache."""
        its, H, rows, dev = self.its, self.H, self.rows, self.dev
        R, P, N, V = its.rank, its.rotary, its.plain, its.values
        table = [ctx.layer.cache[name] for name in ("table", "lengths", "new")]
        own = ctx.layer.cache["latent"]
        with ExitStack() as temps:
            keys, values, turned = self._of_heads(ctx, temps)
            qkv = self._scratch(temps, "latent queries", rows, (H + 2) * (R + P))
            in_qkv = Place(0, qkv.shape[1], R + P)
            with ExitStack() as inner:
                x = self._rotated(ctx, inner, latents)
                of_x = Place(0, x.shape[1], self.Hd)
                heads.copy(dev, qkv, x, rows, H + 1, P, in_qkv._replace(first=R), of_x)
                latent = self._scratch(inner, "kv_latent", rows, R)
                self._norm_latent(ctx, inner, latents, "kv_latent", OutBuffers("", latent))
                self._columns(qkv, H * (R + P), latent, 0, R)
                each = self._scratch(inner, "queries by head", H * rows, N)
                made = self._scratch(inner, "latent queries by head", H * rows, R)
                self._copy(each, Place(0, N, rows * N), x, of_x._replace(first=P), N)
                grouped_matmul(dev, made, each, keys, self.head_starts, trans_b=turned)
                self._copy(qkv, in_qkv, made, Place(0, R, rows * R), R)
            found = self._scratch(temps, "latent outputs", rows, H * R)
            by_text = (qkv.view(self.B, self.T, H + 2, R + P), own, None, *table, H, 1)
            out = found.view(self.B, self.T, H, R)
            more = {"arrived": ctx.layer.cache["arrived"], "scales": ctx.layer.cache.get("scales")}
            paged.attend(dev, out, *by_text, scale=self.scale, **more)
            each = self._scratch(temps, "latent outputs by head", H * rows, R)
            made = self._scratch(temps, "outputs by head", H * rows, V)
            self._copy(each, Place(0, R, rows * R), found, _side_by_side(found, H), R)
            grouped_matmul(dev, made, each, values, self.head_starts, trans_b=not turned)
            self._copy(att, _side_by_side(att, H), made, Place(0, V, rows * V), V)

    def _rotated(self, ctx: LayerContext, temps: ExitStack, latents: Tensor) -> Tensor:
        """Return the queries, and the shared key as the first P channels of one more head, both
        after RoPE: (rows, (H + 1) Hd)."""
        x = self._scratch(temps, "rotated", self.rows, (self.H + 1) * self.Hd)
        with ExitStack() as inner:
            q = self._queries(ctx, inner, latents)
            of_q = Place(0, q.shape[1], self.its.keys)
            self._copy(x, Place(0, x.shape[1], self.Hd), q, of_q, self.its.keys)
        first = self.columns - self.its.rotary
        self._columns(x, self.H * self.Hd, latents, first, self.its.rotary)
        self._rotate(x, self.H + 1, 0)
        return x

    def _of_heads(self, ctx: LayerContext, temps: ExitStack) -> tuple[Tensor, Tensor, bool]:
        """Return the matrices of the heads' keys (H, N, R) and values (H, V, R), and False. With
        codes or adapters, return kv_b's product with the identity: (H, R, N), (H, R, V), and
        True."""
        its, H, w = self.its, self.H, ctx.w["kv_b"]
        sizes, count = (its.plain, its.values), H * its.plain
        if isinstance(w, Tensor) and ctx.w.adapters("kv_b")[0] is None:
            both = zip((w.rows(0, count), w.rows(count, w.shape[0])), sizes, strict=True)
            return *(x.view(H, size, its.rank) for x, size in both), False
        found = [self._scratch(temps, "kv_b by head", H, its.rank, size) for size in sizes]
        with ExitStack() as inner:
            whole = self._scratch(inner, "kv_b transposed", its.rank, H * sum(sizes))
            one = self.operands.quantize(
                inner, ctx.layer.saved.kv_latent.tensor_id, self.identity, measured=False,
                transposed=False,
            )  # fmt: skip
            self.linear.forward(ctx, "kv_b", whole, one)
            for x, size, first in zip(found, sizes, (0, count), strict=True):
                to, of = Place(0, size, its.rank * size), Place(first, whole.shape[1], size)
                heads.copy(self.dev, x, whole, its.rank, H, size, to, of)
        return *found, True

    # -- backward --------------------------------------------------------------------------------

    def recompute(
        self, ctx: LayerContext
    ) -> tuple[Operand | None, Tensor, Tensor, Tensor, Operand | None]:
        """Return x (rows, C); latents, qkv and att; and att as an operand of the output product. x
        and the operand are None if no gradient needs either."""
        r, saved, x, o_input = ctx.layer.recompute, ctx.layer.saved, None, None
        kept = (saved.latents, saved.qkv, saved.att)
        latents, qkv, att = (each.place(self.dev, ctx.temps) for each in kept)
        if r.qkv or self.linear.needs_input(ctx, "latents"):
            x = self.norms.recompute(ctx, product=r.qkv)
        if r.qkv:
            self.linear.forward(ctx, "latents", latents, x)
            self._expand(ctx, latents, qkv)
        if r.att:
            self._attend(ctx, qkv, att)
        if r.block or self.linear.needs_input(ctx, "o"):
            o_input = self.operands.quantize_again(
                ctx.temps, saved.att.tensor_id, att, product=r.block
            )
        if r.block:
            out, addend = ctx.layer.out
            self.linear.forward(ctx, "o", out, o_input, addend)
        return x, latents, qkv, att, o_input

    def backward(
        self, ctx: LayerContext, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """Compute gradients as Half.backward does; inputs: the result of recompute."""
        dev, (x, latents, qkv, att, o_input) = self.dev, inputs
        with ExitStack() as temps:
            d_qkv = d_att = None
            if inside:
                d_qkv = scratch_like(dev, temps, "d_qkv", qkv)
            with ExitStack() as inner:
                if inside:
                    d_att = scratch_like(dev, inner, "d_att", att)
                with ExitStack() as of_output:
                    d_o = self.operands.quantize(
                        of_output, ctx.layer.out_id, d_out, measured=True, transposed=True
                    )
                    self.linear.input_gradient(ctx, "o", d_att, d_o)
                    self.linear.weight_gradients(ctx, "o", d_o, o_input)
                if not inside:
                    return
                by_head = self._by_head(qkv)
                attention.backward(
                    dev, self._by_head(d_qkv), self._padded(inner, d_att),
                    self._padded(inner, att), ctx.layer.saved.lse, by_head, self.H, self.H,
                    self.chunks, self.mask, scale=self.scale, backend=self.backends[1],
                    kernel=attention_backward.chosen(dev, by_head, self.mask),
                )  # fmt: skip
            table, channels = self.turn.table, self.turn.channels
            turned = (self._by_head(d_qkv), table, self.H, self.H, self.starts)
            rope.backward(dev, *turned, channels=channels)
            d_latents = scratch_like(dev, temps, "d_latents", latents)
            self._backward_latents(ctx, latents, d_qkv, d_latents)
            name = ctx.layer.id_of("d_latents")
            d_latents = self.operands.quantize(
                temps, name, d_latents, measured=False, transposed=True
            )
            self.linear.input_gradient(ctx, "latents", d_x, d_latents)
            self.linear.weight_gradients(ctx, "latents", d_latents, x)

    def _padded(self, temps: ExitStack, x: Tensor) -> Tensor:
        """Return heads of V channels (rows, H V), padded with zeros to Hd channels (B, T, H,
        Hd)."""
        if self.its.values == self.Hd:
            return self._by_head(x)
        out = self._scratch(temps, "padded", self.rows, self.H * self.Hd)
        self.dev.zero(out)
        self._copy(out, _side_by_side(out, self.H), x, _side_by_side(x, self.H), self.its.values)
        return self._by_head(out)

    def _backward_latents(
        self, ctx: LayerContext, latents: Tensor, d_qkv: Tensor, d_latents: Tensor
    ) -> None:
        """Compute d_latents (rows, Rq + R + P) and the weights' gradients from d_qkv (rows, 3 H
        Hd), the gradient before RoPE."""
        its, Q = self.its, self.H * self.its.keys
        with ExitStack() as temps:
            d_q = d_latents
            if its.query_rank is not None:
                d_q = self._scratch(temps, "d_q_b", self.rows, Q)
            self._copy(d_q, Place(0, d_q.shape[1], its.keys), d_qkv, self._packed(0), its.keys)
            if its.query_rank is not None:
                self._backward_product(ctx, "q_b", "q_latent", latents, d_q, d_latents)
        with ExitStack() as temps:
            d_kv = self._scratch(temps, "d_kv_b", self.rows, ctx.layer.spec["kv_b"].shape[0])
            of_qkv = self._packed(1, its.rotary), self._packed(2)
            for to, of, size in zip(self._of_kv(), of_qkv, (its.plain, its.values), strict=True):
                self._copy(d_kv, to, d_qkv, of, size)
            self._backward_product(ctx, "kv_b", "kv_latent", latents, d_kv, d_latents)
        shared = Place(self.columns - its.rotary, self.columns, 0)
        sizes = (self.rows, self.H, its.rotary)
        heads.add_up(self.dev, d_latents, d_qkv, *sizes, shared, self._packed(1))

    def _backward_product(
        self,
        ctx: LayerContext,
        key: str,
        name: str,
        latents: Tensor,
        d_out: Tensor,
        d_latents: Tensor,
    ) -> None:
        """Compute the gradients of a latent's product and norm, and the columns of d_latents for
        this latent."""
        w, g, norm = ctx.w, ctx.g, f"{name}_norm"
        with ExitStack() as temps:
            out = self.operands.buffers_again(temps, getattr(ctx.layer.saved, name), product=False)
            raw, stats = self._norm_latent(ctx, temps, latents, name, out)
            x = self.operands.finalize(temps, out)
            d_normed = scratch_like(self.dev, temps, f"d_{name}", raw)
            with ExitStack() as inner:
                tensor_id = ctx.layer.id_of(f"d_{key}")
                d = self.operands.quantize(inner, tensor_id, d_out, measured=False, transposed=True)
                self.linear.input_gradient(ctx, key, d_normed, d)
                self.linear.weight_gradients(ctx, key, d, x)
            d_raw, d_weight = scratch_like(self.dev, temps, f"d_{name} raw", raw), g.get(norm)
            of_norm = (d_normed, raw, w[norm], stats, None)
            self.norm.backward(OutBuffers("", d_raw), d_weight, None, *of_norm)
            self._columns(d_latents, self._first(name), d_raw, 0, d_raw.shape[1])


def _side_by_side(x: Tensor, count: int) -> Place:
    """Return the place of heads in a matrix (rows, count * channels) without other columns."""
    return Place(0, x.shape[1], x.shape[1] // count)
