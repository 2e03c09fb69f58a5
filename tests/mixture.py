"""A made-up family: every other layer has experts in the place of an MLP.

    out[t] = sum over experts e of down[e] @ (up[e] @ x[t]), + x[t - 1]

It is declared as a new one would be: an architecture that makes its HalfSpec, and a half.
"""

from __future__ import annotations

from typing import NamedTuple

from llmq.arch.halves import attention, mlp
from llmq.arch.matrix import HalfSpec, Matrix, Module, Part
from llmq.arch.qwen2 import Qwen2
from llmq.model.linear import Linear
from llmq.ops.pointwise.elementwise import add
from llmq.ops.product.matmul import matmul
from llmq.state.params import planes

EXPERTS, ACTIVE = 3, 2


class Mixture(Qwen2):
    """Layers with a window have experts, of this width."""

    name = "MixtureForCausalLM"
    model_type = "mixture"
    label = "Mixture"

    def __init__(self, width):
        self.width = width

    def layers(self, model, layer):
        has_experts = model.window_of(layer) is not None
        other = experts(model, layer, self.width) if has_experts else mlp(model, layer)
        return attention(model, layer), other


def experts(config, layer, F):
    """many_up: (E, F, C), many_down: (E, C, F); moe_scale: (E,)."""
    C, at, norm = config.hidden_size, f"model.layers.{layer}.moe", mlp(config, layer).norms
    shared = {"active": ACTIVE}

    def parts(module, rows):
        return tuple(
            Part(module=f"{at}.experts.{i}.{module}_proj", rows=rows, targets=(module,))
            for i in range(EXPERTS)
        )

    return HalfSpec(
        kind="mixture",
        name="moe",
        norm="ln2",
        norms=norm,
        modules=(
            Matrix(
                key="many_up", name=f"{at}.many_up", shape=(EXPERTS, F, C),
                parts=parts("up", F), input="ln2", gradient="d_many_up", **shared,
            ),
            Module(
                key="moe_scale", name=f"{at}.scale", shape=(EXPERTS,), kind="vector",
                parts=(Part(module=f"{at}.scale", rows=EXPERTS),), initial="one",
            ),
            Matrix(
                key="many_down", name=f"{at}.many_down", shape=(EXPERTS, C, F),
                parts=parts("down", C), input="many_act", gradient="d_moe",
                initial="residual", **shared,
            ),
        ),
        output=None,
        activations=("many_act",),
        carried={"moe_input": (C,)},
        sizes={"experts": EXPERTS},
    )  # fmt: skip


class Again(NamedTuple):
    x: object
    acts: list


class ExpertsHalf:
    """Without kernels of its own: each expert is two products of the library."""

    def __init__(self, shared):
        self.dev, self.operands, self.linear = shared.dev, shared.operands, Linear(shared.dev)
        self.norms, self.T = shared.norms, shared.options.batch.seq_len

    def keeps_input(self, recompute):
        return not recompute.norm

    def multiplied_again(self, recompute):
        return ("many_up", "many_down") if recompute.block else ()

    def keep(self, layer):
        features = EXPERTS * layer.spec["many_up"].shape[1]
        return layer.activation("many_act", features, kept=not layer.recompute.ffn)

    def _acts(self, temps, layer):
        whole = layer.saved.place(self.dev, temps)
        rows = whole.shape[0]
        flat = whole.view(EXPERTS * rows, whole.shape[1] // EXPERTS)
        return [flat.rows(i * rows, (i + 1) * rows) for i in range(EXPERTS)]

    def _add_neighbours(self, out, x, of_out, of_x):
        """Rows [of_out, of_out + T - 1) of each sequence get those from of_x on of x."""
        for start in range(0, out.shape[0] if self.T > 1 else 0, self.T):
            to = out.rows(start + of_out, start + of_out + self.T - 1)
            add(self.dev, to, to, x.rows(start + of_x, start + of_x + self.T - 1))

    def forward(self, ctx, x):
        layer, w, (out, addend) = ctx.layer, ctx.w, ctx.layer.out
        assert addend is None
        for i, act in enumerate(self._acts(ctx.temps, layer)):
            matmul(self.dev, act, x, planes(w["many_up"])[i], trans_b=True)
            matmul(self.dev, out, act, planes(w["many_down"])[i], trans_b=True, accumulate=i > 0)
        self._add_neighbours(out, x, 1, 0)
        if layer.cache is not None:
            before = layer.cache["moe_input"]
            for b in range(before.shape[0]):
                first, last, stop = b * self.T, before.rows(b, b + 1), (b + 1) * self.T
                add(self.dev, out.rows(first, first + 1), out.rows(first, first + 1), last)
                self.dev.copy(last, x.rows(stop - 1, stop))

    def recompute(self, ctx):
        again = ctx.layer.recompute.ffn
        x = self.norms.recompute(ctx, product=again)
        acts = self._acts(ctx.temps, ctx.layer)
        for i, act in enumerate(acts if again else ()):
            matmul(self.dev, act, x, planes(ctx.w["many_up"])[i], trans_b=True)
        return Again(x, acts)

    def backward(self, ctx, inputs, d_out, d_x, *, inside):
        w, g = ctx.w, ctx.g

        def gradient(key, i, d_y, x):
            if key in g:
                target = g[key]._replace(tensor=planes(g[key].tensor)[i])
                self.linear.weight_gradients(target, None, d_y, x)

        if "moe_scale" in g and not g["moe_scale"].accumulate:  # nothing depends on it
            self.dev.zero(g["moe_scale"].tensor)
        for i, act in enumerate(inputs.acts):
            gradient("many_down", i, d_out, act)
            with self.dev.scratch("d_many_act", act.shape, act.dtype) as d_act:
                matmul(self.dev, d_act, d_out, planes(w["many_down"])[i])
                gradient("many_up", i, d_act, inputs.x)
                if d_x is not None:
                    matmul(self.dev, d_x, d_act, planes(w["many_up"])[i], accumulate=i > 0)
        if d_x is not None:
            self._add_neighbours(d_x, d_out, 0, 1)
