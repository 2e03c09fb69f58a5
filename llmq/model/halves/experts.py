"""A mixture of experts as a half of a block, between its norm and the residual stream.

    x -> router -> the experts of each row, and their weights
    x -> gather -> experts_up -> swiglu -> experts_down -> combine -> out

In the place of swiglu, paired experts have clamped_swiglu, and biases behind all three products.

The rows of a micro-batch, `active` of each of its S, are sorted by their expert: R = S * active
rows, of which each expert multiplies those of its own. No row is dropped, and no shape depends on
the routing. The router's decisions are kept from forward to backward, whatever else is computed
again: they are a few bytes of each row.

A weight stands behind `experts_down`, but backward reads no output of it:

    d_act = weight * (d_out @ experts_down)        d_weight = act . (d_out @ experts_down)
                                                              + d_out . bias

The kernel of act's gradient makes act again, so that it is kept in paired experts alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from llmq.base.dtypes import F32, I32
from llmq.base.operand import Fp8, Operand, OutputForms, tensor_of
from llmq.base.tensor import Tensor
from llmq.formats.format import Activation, InputAgain
from llmq.model.activations import Frame, HalfLayer, Recompute, scratch_like
from llmq.model.halves.expert_linear import ExpertLinear, biases_of
from llmq.model.halves.half import Shared
from llmq.model.halves.shared_expert import SharedExpert, SharedKept
from llmq.model.linear import Linear
from llmq.model.parameters import PartWeights
from llmq.ops import quantize, swiglu
from llmq.ops.elementwise import convert
from llmq.ops.expert_rows import combine, combine_backward, gather_rows, sort_rows
from llmq.ops.fp8_scale import abs_max
from llmq.ops.matmul import matmul
from llmq.ops.route import route, route_backward
from llmq.runtime.device import Device


class _Kept(NamedTuple):
    """The tensors kept of one layer. router_logits: F32 (S, E). chosen: I32 (S, K), the experts of
    a row. weights: F32 (S, K), of these. order: I32 (R,), the row and choice s * K + k that each
    sorted row is. place: I32 (S, K), the sorted row of each choice. starts: I32 (E+1,), where each
    expert's rows begin. up: (R, 2F). act: (R, F). shared: of the shared expert."""

    router_logits: Tensor
    chosen: Tensor
    weights: Tensor
    order: Tensor
    place: Tensor
    starts: Tensor
    up: Activation
    act: Activation
    shared: SharedKept | None


def _written(
    dev: Device,
    shape: tuple[int, int],
    to: OutputForms,
    operation: Callable[..., None],
    x: Tensor,
    *rest: Any,
) -> None:
    """Do an operation that writes a tensor alone, and make the other forms of it."""
    with ExitStack() as temps:
        out = to.out
        if out is None:
            out = temps.enter_context(dev.scratch("expert_tensor", shape, x.dtype))
        operation(dev, out, x, *rest)
        if to.fp8 is not None:
            quantize.scaled(dev, out, to.fp8, abs_max=to.abs_max)
        elif to.abs_max is not None:
            abs_max(dev, to.abs_max, out)


class ExpertsHalf:
    """The experts of all layers that have some."""

    def __init__(self, shared: Shared):
        self.dev, self.routers, options = shared.dev, Linear(shared.dev), shared.options
        its, self.operands = shared.config.experts, shared.operands
        self.clamp = None if its.alpha is None else (its.alpha, its.limit)
        rows = options.batch_size * options.local_seq_len * its.active
        self.linear = ExpertLinear(shared, rows)
        shares = its.shared_size is not None
        self.shared, self.balance = SharedExpert(shared) if shares else None, shared.balance

    def keeps_input(self, recompute: Recompute) -> bool:
        return not (recompute.norm or recompute.ffn)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        shared = ("shared_up",) * (self.shared is not None)
        return ("experts_up", *shared) if recompute.ffn else ()

    def keep(self, here: HalfLayer) -> _Kept:
        K, r, S = here.spec.sizes["active"], here.recompute, here.rows
        keeps_act = not r.swiglu and "expert_act" not in here.spec.made_again
        E, _, F = here.spec["experts_down"].shape
        return _Kept(
            router_logits=here.alloc("router_logits", S, E, dtype=F32),
            chosen=here.alloc("chosen", S, K, dtype=I32),
            weights=here.alloc("expert_weights", S, K, dtype=F32),
            order=here.alloc("expert_order", S * K, dtype=I32),
            place=here.alloc("expert_place", S, K, dtype=I32),
            starts=here.alloc("expert_starts", E + 1, dtype=I32),
            up=here.activation("expert_up", 2 * F, kept=not r.ffn, per_row=K),
            act=here.activation("expert_act", F, kept=keeps_act, per_row=K),
            shared=self.shared and self.shared.keep(here),
        )

    def forward(self, at: Frame, x: Operand) -> None:
        dev, here, kept, out = self.dev, at.here, at.here.kept, at.here.out.out
        self._multiply_router(kept.router_logits, at.w, tensor_of(x))
        how = {"renormalize": here.spec.sizes["renormalize"]}
        if at.keep and self.balance is not None:
            how |= {"sums": self.balance.sums(here.index), "targets": self.balance.targets}
        route(dev, kept.chosen, kept.weights, kept.router_logits, **how)
        sort_rows(dev, kept.order, kept.place, kept.starts, kept.chosen)
        up = kept.up.place(dev, at.temps)
        self._multiply_up(at, x, up)
        act = self.operands.input(at.temps, kept.act, partial(self._activate, up))
        with self._sorted("expert_out", kept, out) as y:
            self.linear.forward(at, "experts_down", y, act)
            combine(dev, out, y, kept.place, kept.weights)
        if self.shared is not None:
            self.shared.forward(at, x)

    def recompute(
        self, at: Frame, x_again: InputAgain
    ) -> tuple[Operand | None, Tensor, Tensor | None]:
        """x (S, C), None where no gradient needs it; up (R, 2F); of a shared expert (S, 2Fs)."""
        computed, shared, x, shared_up = at.here.recompute.ffn, self.shared, None, None
        up = at.here.kept.up.place(self.dev, at.temps)
        trained = "router" in at.g or self.linear.trains(at, "experts_up")
        if computed or trained or (shared is not None and shared.needs_input(at)):
            x = x_again(product=computed)
        if computed:
            self._multiply_up(at, x, up)
        if shared is not None:
            shared_up = shared.up_again(at, x)
        return x, up, shared_up

    def backward(
        self, at: Frame, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """Leaves nothing out; overwrites up."""
        here, kept, (x, up, shared_up) = at.here, at.here.kept, inputs
        if self.shared is not None:
            self.shared.backward(at, x, shared_up, d_out, d_x)
        keys = {key for module in here.spec.modules for key in module.keys}
        if d_x is None and not keys & at.g.keys():
            return
        x = x and tensor_of(x)
        with ExitStack() as temps:
            d_weights = scratch_like(self.dev, temps, "d_expert_weights", kept.weights)
            write = partial(self._backward_down, at, up, d_out, d_weights)
            how = {"shape": up.shape, "out": up}
            d_up = self.operands.gradient(temps, here.id_of("d_expert_up"), write, **how)
            self._backward_up(at, x, d_up, d_x)
            self._backward_router(at, x, d_out, d_weights, d_x)

    def _backward_down(
        self, at: Frame, up: Tensor, d_out: Tensor, d_weights: Tensor, to: OutputForms
    ) -> None:
        """`to` is the gradient of up (may be up); d_weights (S, K) is that of the weights."""
        dev, here, kept = self.dev, at.here, at.here.kept
        with ExitStack() as temps:
            trains = self.linear.trains(at, "experts_down")
            reads = "expert_act" not in here.spec.made_again
            act = kept.act.place(dev, temps) if trains or reads else None
            how = {"measured": True, "transposed": True}
            d_rows = self.operands.of_tensor(temps, here.out_id, d_out, **how)
            whole = trains or at.g.bias("experts_down") is not None
            d_y = temps.enter_context(self._gathered(kept, "d_expert_out", d_rows, whole=whole))
            scratch = dev.scratch("d_expert_act", kept.act.shape, kept.act.dtype)
            d_act = temps.enter_context(scratch)
            self.linear.input_gradient(at, "experts_down", d_act, d_y)
            self._backward_act(kept, d_act, d_weights, act, up, to)
            d = tensor_of(d_y)
            if trains:
                self.linear.weight_gradients(at, "experts_down", d, act)
            self.linear.bias_gradients(at, "experts_down", d, kept.weights, kept.order)

    def _activate(self, up: Tensor, to: OutputForms) -> None:
        if self.clamp is None:
            swiglu.forward(self.dev, to.out, up, abs_max=to.abs_max, fp8=to.fp8)
        else:
            shape = up.shape[0], up.shape[1] // 2
            _written(self.dev, shape, to, swiglu.clamped_forward, up, *self.clamp)

    def _backward_act(
        self,
        kept: _Kept,
        d_act: Tensor,
        d_weights: Tensor,
        act: Tensor | None,
        up: Tensor,
        to: OutputForms,
    ) -> None:
        """d_act is without weights; act (None: not wanted) becomes forward's with weights."""
        dev, weights = self.dev, kept.weights
        if self.clamp is None:
            how = {"abs_max": to.abs_max, "fp8": to.fp8}
            rows = (d_act, up, kept.order, weights, act)
            swiglu.weighted_backward(dev, to.out, d_weights, *rows, **how)
            return
        if kept.act.tensor is None:
            swiglu.clamped_forward(dev, act, up, *self.clamp)
        combine_backward(dev, d_act, d_weights, act, kept.place, weights, act)
        _written(dev, up.shape, to, swiglu.clamped_backward, d_act, up, *self.clamp)

    def _backward_up(self, at: Frame, x: Tensor | None, d_up: Operand, d_x: Tensor | None) -> None:
        """d_x, if it is wanted: with a shared expert, it is added to what is there."""
        dev, kept = self.dev, at.here.kept
        with ExitStack() as temps:
            d_rows = d_x and temps.enter_context(self._sorted("d_expert_x", kept, d_x))
            self.linear.input_gradient(at, "experts_up", d_rows, d_up)
            if d_x is not None:
                of_shared = None if self.shared is None else d_x
                combine(dev, d_x, d_rows, kept.place, addend=of_shared)
        whole = tensor_of(d_up)
        self.linear.bias_gradients(at, "experts_up", whole)
        if self.linear.trains(at, "experts_up"):
            with self._gathered(kept, "expert_x", x) as rows:
                self.linear.weight_gradients(at, "experts_up", whole, rows)

    def _backward_router(
        self, at: Frame, x: Tensor | None, d_out: Tensor, d_weights: Tensor, d_x: Tensor | None
    ) -> None:
        """Adds to d_x, if it is wanted."""
        dev, here, w, g, logits = self.dev, at.here, at.w, at.g, at.here.kept.router_logits
        balance, how = self.balance, {"renormalize": here.spec.sizes["renormalize"]}
        how |= {"factors": balance.factors, "targets": balance.targets}
        biases = biases_of(w, "experts_down", logits.shape[1])
        with ExitStack() as temps:
            scratch = dev.scratch("d_router_logits", logits.shape, w["router"].dtype)
            d_logits = temps.enter_context(scratch)
            if biases is not None:
                how["of_experts"] = scratch_like(dev, temps, "d_of_biases", logits)
                matmul(dev, how["of_experts"], d_out, biases, trans_b=True)
            route_backward(dev, d_logits, d_weights, logits, here.kept.chosen, **how)
            if d_x is not None:
                matmul(dev, d_x, d_logits, w["router"], accumulate=True)
            self.routers.weight_gradients(g.get("router"), g.bias("router"), d_logits, x)

    def _multiply_router(self, logits: Tensor, w: PartWeights, x: Tensor) -> None:
        bias = w.bias("router")
        with ExitStack() as temps:
            if bias is not None and bias.dtype != F32:
                bias = temps.enter_context(self.dev.scratch("router_bias", bias.shape, F32))
                convert(self.dev, bias, w.bias("router"))
            matmul(self.dev, logits, x, w["router"], trans_b=True, bias=bias)

    def _multiply_up(self, at: Frame, x: Operand, up: Tensor) -> None:
        adapted = at.w.adapters("experts_up")[0] is not None
        with self._gathered(at.here.kept, "expert_x", x, whole=adapted) as rows:
            self.linear.forward(at, "experts_up", up, rows)

    @contextmanager
    def _gathered(
        self, kept: _Kept, name: str, x: Operand, *, whole: bool = True
    ) -> Iterator[Operand]:
        """The sorted rows of x. whole: of codes, the tensor too."""
        codes = rows = None
        with ExitStack() as temps:
            if isinstance(x, Fp8):
                codes = temps.enter_context(self._sorted(f"{name}.q", kept, x.codes))
                gather_rows(self.dev, codes, x.codes, kept.place)
            if codes is None or whole:
                source = tensor_of(x)
                rows = temps.enter_context(self._sorted(name, kept, source))
                gather_rows(self.dev, rows, source, kept.place)
            if codes is None:
                yield rows
            else:
                yield Fp8(source=rows, codes=codes, transposed=None, scale=x.scale)

    def _sorted(self, name: str, kept: _Kept, like: Tensor) -> AbstractContextManager[Tensor]:
        """Scratch of R rows as wide as another tensor."""
        return self.dev.scratch(name, (kept.order.size, like.shape[1]), like.dtype)
