"""A mixture of experts in a transformer block, from the norm of the input to the addition to the
residual stream.

    x -> router -> the experts of each row, and their weights
    x -> gather -> experts_up -> swiglu -> experts_down -> combine -> out

Paired experts have clamped_swiglu in place of swiglu, and biases in all three products. Experts
without gates have the same activation as MLPs.

Each of the S rows (tokens) of a micro-batch is sent to `active` experts. The R = S * active pairs
of row and expert are sorted by expert, and each expert multiplies the rows of its pairs. No row is
dropped, and no shape depends on the routing. The router's decisions, a few bytes per row, are
always kept from forward to backward.

The weight of a row multiplies the output of `experts_down`, but backward does not read that output:

    d_act = weight * (d_out @ experts_down)        d_weight = act . (d_out @ experts_down)
                                                              + d_out . bias

The kernel of act's gradient recomputes act. Only experts for which this kernel does not, such as
paired experts, may keep act.
"""

from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

from llmq.base.dtypes import F32, I32, DType
from llmq.base.operand import Fp8, Operand, OutBuffers, tensor_of
from llmq.base.tensor import Tensor
from llmq.formats.operands import Activation
from llmq.model.activations import HalfLayer, LayerContext, Recompute, scratch_like
from llmq.model.halves.expert_linear import ExpertLinear, biases_of
from llmq.model.halves.half import ModelContext
from llmq.model.halves.shared_expert import SharedExpert, SharedKept
from llmq.model.linear import Linear
from llmq.ops.experts import expert_scale
from llmq.ops.experts.expert_rows import combine, combine_backward, gather_rows, sort_rows
from llmq.ops.experts.route import route, route_backward
from llmq.ops.pointwise import norm, swiglu
from llmq.ops.pointwise.elementwise import convert
from llmq.ops.product.matmul import matmul
from llmq.ops.product.product import ACTIVATIONS
from llmq.ops.quantize import quantize
from llmq.ops.quantize.fp8_scale import abs_max


class _Saved(NamedTuple):
    """The tensors of one layer that backward reads. router_logits: F32 (S, E). chosen: I32 (S, K),
    the K experts of each row. weights: F32 (S, K), the weights of these experts. order: I32 (R,), s
    * K + k for each sorted row, which is row s for its k-th expert. place: I32 (S, K), the sorted
    row for each row and choice. starts: I32 (E+1,), the first sorted row of each expert. up: (R,
    2F), the output of experts_up. act: (R, F), the activation. shared: the tensors of the shared
    expert; None without a shared expert. unscaled: F32 (S, K), weights before multiplication by
    experts' trained factors; None without such factors."""

    router_logits: Tensor
    chosen: Tensor
    weights: Tensor
    order: Tensor
    place: Tensor
    starts: Tensor
    up: Activation
    act: Activation
    shared: SharedKept | None
    unscaled: Tensor | None


class ExpertsHalf:
    """The experts of all layers with experts."""

    def __init__(self, shared: ModelContext):
        self.dev, self.routers = shared.dev, Linear(shared.dev)
        self.norms = shared.norms
        config, experts, self.operands = shared.config, shared.config.experts, shared.operands
        self.eps, self.gelu = config.norm_eps, config.activation == "geglu"
        self.activation, self.gated = ACTIVATIONS[config.activation], config.gated
        if config.arch.beside_mlp:  # the router's norm has its own factor
            self.routers.alpha = config.hidden_size**-0.5
        self.clamp = None if experts.alpha is None else (experts.alpha, experts.limit)
        rows = shared.options.batch.micro_tokens * experts.active
        self.linear = ExpertLinear(shared, rows)
        self.groups = (experts.groups, experts.active_groups)
        scale = experts.scale * shared.config.residual_multiplier
        self.scores = {"scale": scale, "renormalize": experts.renormalize}
        self.scores["kind"] = "sigmoid" if shared.config.arch.sigmoid else "softmax"
        shares = experts.shared_size is not None
        self.shared, self.balance = SharedExpert(shared) if shares else None, shared.balance

    def keeps_input(self, recompute: Recompute) -> bool:
        return not (recompute.norm or recompute.ffn)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        shared = ("shared_up",) * (self.shared is not None)
        return ("experts_up", *shared) if recompute.ffn else ()

    def keep(self, layer: HalfLayer) -> _Saved:
        K, r, S = layer.spec.sizes["active"], layer.recompute, layer.rows
        keeps_act = not r.swiglu and "expert_act" not in layer.spec.made_again
        E, _, F = layer.spec["experts_down"].shape
        _, up, _ = layer.spec["experts_up"].shape
        scales = any(module.key == "expert_scale" for module in layer.spec.modules)
        return _Saved(
            router_logits=layer.alloc("router_logits", S, E, dtype=F32),
            chosen=layer.alloc("chosen", S, K, dtype=I32),
            weights=layer.alloc("expert_weights", S, K, dtype=F32),
            order=layer.alloc("expert_order", S * K, dtype=I32),
            place=layer.alloc("expert_place", S, K, dtype=I32),
            starts=layer.alloc("expert_starts", E + 1, dtype=I32),
            up=layer.activation("expert_up", up, kept=not r.ffn, per_row=K),
            act=layer.activation("expert_act", F, kept=keeps_act, per_row=K),
            shared=self.shared and self.shared.keep(layer),
            unscaled=layer.alloc("unscaled_weights", S, K, dtype=F32) if scales else None,
        )

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        dev, layer, kept = self.dev, ctx.layer, ctx.layer.saved
        self._multiply_router(ctx, x)
        how = self.scores | {"bias": ctx.w.get("router_correction"), "groups": self.groups}
        if ctx.keep and self.balance is not None:
            how |= {"sums": self.balance.sums(layer.index), "targets": self.balance.targets}
        weights = kept.weights if kept.unscaled is None else kept.unscaled
        route(dev, kept.chosen, weights, kept.router_logits, **how)
        if kept.unscaled is not None:
            factors = (ctx.w["expert_scale"], kept.chosen)
            expert_scale.forward(dev, kept.weights, weights, *factors)
        sort_rows(dev, kept.order, kept.place, kept.starts, kept.chosen)
        up = kept.up.place(dev, ctx.temps)
        self._multiply_up(ctx, x, up)
        self._multiply_down(ctx, ctx.temps, up, self.operands.buffers(ctx.temps, kept.act))
        if self.shared is not None:
            self.shared.forward(ctx, x)

    def recompute(self, ctx: LayerContext) -> tuple[Operand | None, Tensor, Tensor | None]:
        """Return x (S, C), None if no gradient needs x; up (R, 2F); and the shared expert's up (S,
        2Fs), or None."""
        computed, shared, x, shared_up = ctx.layer.recompute.ffn, self.shared, None, None
        up = ctx.layer.saved.up.place(self.dev, ctx.temps)
        trained = "router" in ctx.g or self.linear.trains(ctx, "experts_up")
        if computed or trained or (shared is not None and shared.needs_input(ctx)):
            x = self.norms.recompute(ctx, product=computed)
        if computed:
            self._multiply_up(ctx, x, up)
        if ctx.layer.made_again:
            with ExitStack() as temps:
                act = self.operands.buffers_again(temps, ctx.layer.saved.act, product=True)
                self._multiply_down(ctx, temps, up, act)
        if shared is not None:
            shared_up = shared.up_again(ctx, x)
        return x, up, shared_up

    def backward(
        self, ctx: LayerContext, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """Compute gradients as Half.backward does; the method ignores `inside` and overwrites
        up."""
        layer, kept, (x, up, shared_up) = ctx.layer, ctx.layer.saved, inputs
        if self.shared is not None:
            self.shared.backward(ctx, x, shared_up, d_out, d_x)
        keys = {key for module in layer.spec.modules for key in module.keys}
        if d_x is None and not keys & ctx.g.keys():
            return
        x, dev, linear = x and tensor_of(x), self.dev, self.linear
        trains = linear.trains(ctx, "experts_down")
        with ExitStack() as temps:
            d_weights = scratch_like(dev, temps, "d_expert_weights", kept.weights)
            d_up = self.operands.gradient_buffers(temps, layer.id_of("d_expert_up"), up.shape, up)
            with ExitStack() as inner:
                reads = trains or "expert_act" not in layer.spec.made_again
                act = kept.act.place(dev, inner) if reads else None
                d_rows = self.operands.quantize(
                    inner, layer.out_id, d_out, measured=True, transposed=True
                )
                whole = trains or ctx.g.bias("experts_down") is not None
                d_y = self._gathered(inner, kept, "d_expert_out", d_rows, whole=whole)
                scratch = dev.scratch("d_expert_act", kept.act.shape, kept.act.dtype)
                d_act = inner.enter_context(scratch)
                linear.input_gradient(ctx, "experts_down", d_act, d_y)
                self._backward_act(kept, d_act, d_weights, act, up, d_up)
                d = tensor_of(d_y)
                if trains:
                    linear.weight_gradients(ctx, "experts_down", d, act)
                linear.bias_gradients(ctx, "experts_down", d, kept.weights, kept.order)
            d_up = self.operands.finalize(temps, d_up)
            self._backward_up(ctx, x, d_up, d_x)
            self._backward_router(ctx, x, d_out, d_weights, d_x)

    def _activate(self, up: Tensor, to: OutBuffers) -> None:
        """Write the activation (R, F) of up, (R, 2F) or without gates (R, F), to the buffers
        `to`."""
        if self.clamp is None:
            self.activation[0](self.dev, to.tensor, up, abs_max=to.abs_max, fp8=to.fp8)
            return
        with ExitStack() as temps:
            act = self._tensor_of(temps, to, (up.shape[0], up.shape[1] // 2), up.dtype)
            swiglu.clamped_forward(self.dev, act, up, *self.clamp)
            self._other_forms(to, act)

    def _tensor_of(
        self, temps: ExitStack, to: OutBuffers, shape: tuple[int, int], dtype: DType
    ) -> Tensor:
        """Return the tensor for a kernel that writes no codes: the tensor of the buffers, or
        scratch."""
        if to.tensor is not None:
            return to.tensor
        return temps.enter_context(self.dev.scratch("expert_tensor", shape, dtype))

    def _other_forms(self, to: OutBuffers, x: Tensor) -> None:
        """Write the codes of x, and the largest |x|, if the buffers have memory for either."""
        if to.fp8 is not None:
            quantize.scaled(self.dev, x, to.fp8, abs_max=to.abs_max)
        elif to.abs_max is not None:
            abs_max(self.dev, to.abs_max, x)

    def _backward_act(
        self,
        kept: _Saved,
        d_act: Tensor,
        d_weights: Tensor,
        act: Tensor | None,
        up: Tensor,
        to: OutBuffers,
    ) -> None:
        """Write the gradient of up to `to`, and the gradient of the experts' weights to d_weights.
        d_act: (R, F), the gradient of act, not multiplied by weights. act: becomes forward's act
        times the weights; None if not wanted."""
        dev, weights = self.dev, kept.weights
        if self.clamp is None and self.gated:
            swiglu.weighted_backward(
                dev, to.tensor, d_weights, d_act, up, kept.order, weights, act, gelu=self.gelu,
                abs_max=to.abs_max, fp8=to.fp8,
            )  # fmt: skip
            return
        if kept.act.tensor is None:
            self._activate(up, OutBuffers(name=kept.act.tensor_id, tensor=act))
        combine_backward(dev, d_act, d_weights, act, kept.place, weights, act)
        if self.clamp is None:
            self.activation[1](dev, to.tensor, d_act, up, abs_max=to.abs_max, fp8=to.fp8)
            return
        with ExitStack() as temps:
            d_up = self._tensor_of(temps, to, up.shape, up.dtype)
            swiglu.clamped_backward(dev, d_up, d_act, up, *self.clamp)
            self._other_forms(to, d_up)

    def _backward_up(
        self, ctx: LayerContext, x: Tensor | None, d_up: Operand, d_x: Tensor | None
    ) -> None:
        """Compute experts_up's gradients, and d_x (S, C) unless d_x is None. With a shared expert,
        add to d_x."""
        dev, kept = self.dev, ctx.layer.saved
        with ExitStack() as temps:
            d_rows = d_x and temps.enter_context(self._sorted("d_expert_x", kept, d_x))
            self.linear.input_gradient(ctx, "experts_up", d_rows, d_up)
            if d_x is not None:
                of_shared = None if self.shared is None else d_x
                combine(dev, d_x, d_rows, kept.place, addend=of_shared)
        whole = tensor_of(d_up)
        self.linear.bias_gradients(ctx, "experts_up", whole)
        if self.linear.trains(ctx, "experts_up"):
            with ExitStack() as temps:
                rows = self._gathered(temps, kept, "expert_x", x)
                self.linear.weight_gradients(ctx, "experts_up", whole, rows)

    def _backward_router(
        self,
        ctx: LayerContext,
        x: Tensor | None,
        d_out: Tensor,
        d_weights: Tensor,
        d_x: Tensor | None,
    ) -> None:
        """Compute the gradients of the router. Add the gradient of the router's input to d_x,
        unless d_x is None; with router_norm, add to ctx.d_stream."""
        dev, layer, w, g, logits = self.dev, ctx.layer, ctx.w, ctx.g, ctx.layer.saved.router_logits
        balance = self.balance
        how = self.scores | {"factors": balance.factors, "targets": balance.targets}
        biases = biases_of(w, "experts_down", logits.shape[1])
        with ExitStack() as temps:
            scratch = dev.scratch("d_router_logits", logits.shape, w["router"].dtype)
            d_logits = temps.enter_context(scratch)
            if biases is not None:
                how["of_experts"] = scratch_like(dev, temps, "d_of_biases", logits)
                matmul(dev, how["of_experts"], d_out, biases, trans_b=True)
            if layer.saved.unscaled is not None:
                order = (w["expert_scale"], layer.saved.order, layer.saved.starts)
                of_scale = g.get("expert_scale")
                expert_scale.backward(dev, d_weights, of_scale, layer.saved.unscaled, *order)
            route_backward(dev, d_logits, d_weights, logits, layer.saved.chosen, **how)
            if "router_norm" in w:
                x = self._router_input(temps, ctx)
                self._backward_router_norm(ctx, d_logits)
            elif d_x is not None:
                matmul(dev, d_x, d_logits, w["router"], accumulate=True)
            self.routers.weight_gradients(g.get("router"), g.bias("router"), d_logits, x)
        correction = g.get("router_correction")
        if correction is not None and not correction.accumulate:
            dev.zero(correction.tensor)

    def _router_input(self, temps: ExitStack, ctx: LayerContext) -> Tensor:
        """Return the normed stream (S, C), the input of a router with a separate norm. The router's
        norm has the same statistics as the norm before the experts."""
        stream, rstd = ctx.layer.norm.stream, ctx.layer.norm.stats.rstd
        z = scratch_like(self.dev, temps, "router_input", stream)
        norm.post(self.dev, z, rstd, stream, None, ctx.w["router_norm"], self.eps)
        return z

    def _backward_router_norm(self, ctx: LayerContext, d_logits: Tensor) -> None:
        stream, rstd = ctx.layer.norm.stream, ctx.layer.norm.stats.rstd
        w, d_weight = ctx.w, ctx.g.get("router_norm")
        with ExitStack() as temps:
            d_z = scratch_like(self.dev, temps, "d_router_input", stream)
            matmul(self.dev, d_z, d_logits, w["router"], alpha=self.routers.alpha)
            of_stream = (w["router_norm"], None, rstd, ctx.d_stream)
            norm.backward(self.dev, ctx.d_stream, d_weight, None, d_z, stream, *of_stream)

    def _multiply_router(self, ctx: LayerContext, x: Operand) -> None:
        w, logits, bias = ctx.w, ctx.layer.saved.router_logits, ctx.w.bias("router")
        with ExitStack() as temps:
            x = self._router_input(temps, ctx) if "router_norm" in w else tensor_of(x)
            if bias is not None and bias.dtype != F32:
                bias = temps.enter_context(self.dev.scratch("router_bias", bias.shape, F32))
                convert(self.dev, bias, w.bias("router"))
            alpha = self.routers.alpha
            matmul(self.dev, logits, x, w["router"], trans_b=True, bias=bias, alpha=alpha)

    def _multiply_up(self, ctx: LayerContext, x: Operand, up: Tensor) -> None:
        adapted = ctx.w.adapters("experts_up")[0] is not None
        with ExitStack() as temps:
            rows = self._gathered(temps, ctx.layer.saved, "expert_x", x, whole=adapted)
            self.linear.forward(ctx, "experts_up", up, rows)

    def _multiply_down(
        self, ctx: LayerContext, temps: ExitStack, up: Tensor, act: OutBuffers
    ) -> None:
        """Compute the output of the experts from up (R, 2F). act: buffers for the activation (R,
        F), which live as long as `temps`."""
        kept, out = ctx.layer.saved, ctx.layer.out.out
        self._activate(up, act)
        operand = self.operands.finalize(temps, act)
        with self._sorted("expert_out", kept, out) as y:
            self.linear.forward(ctx, "experts_down", y, operand)
            combine(self.dev, out, y, kept.place, kept.weights)

    def _gathered(
        self, temps: ExitStack, kept: _Saved, name: str, x: Operand, *, whole: bool = True
    ) -> Operand:
        """Return the rows of x (S, n) sorted by expert, (R, n), as scratch of `temps`. whole: False
        if only the codes of x are wanted, in case x has codes."""
        codes = rows = None
        if isinstance(x, Fp8):
            codes = temps.enter_context(self._sorted(f"{name}.q", kept, x.codes))
            gather_rows(self.dev, codes, x.codes, kept.place)
        if codes is None or whole:
            source = tensor_of(x)
            rows = temps.enter_context(self._sorted(name, kept, source))
            gather_rows(self.dev, rows, source, kept.place)
        if codes is None:
            return rows
        return Fp8(source=rows, codes=codes, transposed=None, scale=x.scale)

    def _sorted(self, name: str, kept: _Saved, like: Tensor) -> AbstractContextManager[Tensor]:
        """Return scratch (R, n) for the sorted rows of `like` (S, n)."""
        return self.dev.scratch(name, (kept.order.size, like.shape[1]), like.dtype)
