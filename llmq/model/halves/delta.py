"""A gated delta net as a half of a block: linear attention over a state.

    x -> delta_in -> q, k, v -> short convolution -> delta rule -> gated norm -> delta_o -> out
                  -> b, a -> betas and decays ----------^             ^
                  -> z -----------------------------------------------+

A row of delta_in is (q, k, v, z, b, a). `operands` turns a tensor into what products take: with fp8
codes and a scale, without it itself. States begin with 0 where documents do, and lie in F32.
"""

from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from llmq.base.dtypes import F32
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.formats.format import Activation, InputAgain
from llmq.model.activations import Frame, HalfLayer, Recompute, scratch_like
from llmq.model.halves.half import Output, Shared
from llmq.ops import delta_gates, delta_rule, gated_norm, short_conv
from llmq.ops.delta_rule import Heads


class _Kept(NamedTuple):
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

    def __init__(self, shared: Shared):
        its, options = shared.config.delta, shared.options
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.output = Output(shared, "delta_o")
        self.B, self.T, self.starts = options.batch_size, options.local_seq_len, shared.starts
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

    def keep(self, here: HalfLayer) -> _Kept:
        r = here.recompute
        return _Kept(
            delta_in=here.activation("delta_in", here.spec["delta_in"].shape[0], kept=not r.qkv),
            delta_conv=here.activation("delta_conv", self.channels, kept=not (r.qkv or r.att)),
            gates=here.alloc("delta_gates", self.B, self.T, 2, self.heads.Hv, dtype=F32),
            delta_state=here.activation("delta_state", self.values, kept=not r.att),
            delta_gated=here.activation("delta_gated", self.values, kept=False),
        )

    def _by_token(self, tensor: Tensor) -> Tensor:
        """(rows, n) as (B, T, n)."""
        return tensor.view(self.B, self.T, tensor.shape[1])

    def _tensors(self, temps: ExitStack, here: HalfLayer) -> _Tensors:
        """Where they are kept, else scratch."""
        kept = (here.kept.delta_in, here.kept.delta_conv, here.kept.delta_state)
        return _Tensors(*(activation.place(self.dev, temps) for activation in kept))

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, at: Frame, x: Operand) -> None:
        here, tensors = at.here, self._tensors(at.temps, at.here)
        for carried in (here.cache or {}).values() if at.position == 0 else ():
            self.dev.zero(carried)  # a text begins
        self.linear.forward(at, "delta_in", tensors.delta_in, x)
        self._convolve(at, tensors)
        self._read_states(here, tensors)
        gated = self._gated(at, tensors)
        self.output.forward(at, here.kept.delta_gated.tensor_id, gated)

    def _convolve(self, at: Frame, tensors: _Tensors) -> None:
        """Queries, keys and values, and the gates."""
        here, w = at.here, at.w
        before = None if here.cache is None else here.cache["before"]
        out, x = self._by_token(tensors.delta_conv), self._by_token(tensors.delta_in)
        short_conv.forward(self.dev, out, x, w["conv"], self.starts, before)
        gates = (w["a_log"], w["dt_bias"], self.of_gates)
        delta_gates.forward(self.dev, here.kept.gates, tensors.delta_in, *gates)

    def _read_states(self, here: HalfLayer, tensors: _Tensors) -> None:
        out, qkv = self._by_token(tensors.delta_state), self._by_token(tensors.delta_conv)
        gates, state = here.kept.gates, None if here.cache is None else here.cache["state"]
        if state is not None and self.T <= delta_rule.FEW_TOKENS:
            delta_rule.recurrence(self.dev, out, state, qkv, gates, self.heads)
            return
        delta_rule.forward(self.dev, out, qkv, gates, self.heads, self.starts, state)

    def _gated(self, at: Frame, tensors: _Tensors) -> Tensor:
        out = at.here.kept.delta_gated.place(self.dev, at.temps)
        how = (at.w["delta_norm"], self.eps, self.of_gate)
        gated_norm.forward(self.dev, out, tensors.delta_state, tensors.delta_in, *how)
        return out

    # -- backward --------------------------------------------------------------------------------

    def recompute(
        self, at: Frame, x_again: InputAgain
    ) -> tuple[Operand | None, _Tensors, Operand | None]:
        """x (rows, C), and delta_gated as the output product's operand, last; None where no
        gradient needs it."""
        r, tensors, x = at.here.recompute, self._tensors(at.temps, at.here), None
        if r.qkv or self.linear.needs_input(at, "delta_in"):
            x = x_again(product=r.qkv)
        if r.qkv:
            self.linear.forward(at, "delta_in", tensors.delta_in, x)
        if r.qkv or r.att:
            self._convolve(at, tensors)
        if r.att:
            self._read_states(at.here, tensors)
        made, tensor_id = partial(self._gated, at, tensors), at.here.kept.delta_gated.tensor_id
        return x, tensors, self.output.again(at, tensor_id, made)

    def backward(
        self, at: Frame, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        x, tensors, o_input = inputs
        if not inside:
            self.output.backward(at, o_input, d_out, None)
            return
        with ExitStack() as temps:
            d_in = scratch_like(self.dev, temps, "d_delta_in", tensors.delta_in)
            with ExitStack() as inner:
                self._backward_inside(inner, at, tensors, o_input, d_out, d_in)
            name, how = at.here.id_of("d_delta_in"), {"measured": False, "transposed": True}
            d_product = self.operands.of_tensor(temps, name, d_in, **how)
            self.linear.input_gradient(at, "delta_in", d_x, d_product)
            self.linear.weight_gradients(at, "delta_in", d_product, x)

    def _backward_inside(
        self,
        temps: ExitStack,
        at: Frame,
        tensors: _Tensors,
        o_input: Operand | None,
        d_out: Tensor,
        d_in: Tensor,
    ) -> None:
        """d_in, all columns of it, and the gradients of what stands between the products."""
        dev, w, g, gates = self.dev, at.w, at.g, at.here.kept.gates
        delta_in, conv, state = tensors
        d_state = scratch_like(dev, temps, "d_delta_state", state)
        with ExitStack() as first:
            d_gated = scratch_like(dev, first, "d_delta_gated", state)
            self.output.backward(at, o_input, d_out, d_gated)
            gated_norm.backward(
                dev, d_state, d_in, g.get("delta_norm"), d_gated, state, delta_in,
                w["delta_norm"], self.eps, self.of_gate,
            )  # fmt: skip
        d_conv = scratch_like(dev, temps, "d_delta_conv", conv)
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
