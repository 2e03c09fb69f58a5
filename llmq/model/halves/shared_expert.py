"""The shared expert, which computes every token beside the token's chosen experts, with or without
a gate.

    x -> shared_up -> swiglu|relu2 (-> * sigmoid(x @ shared_gate)) -> shared_down -> added to out

Architectures multiply by the gate after shared_down. The gate is a factor of whole rows, so
multiplying before shared_down has the same effect, and backward needs no output of shared_down.
"""

from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import F32, I32
from llmq.base.operand import Operand, tensor_of
from llmq.base.tensor import Tensor
from llmq.formats.operands import Activation
from llmq.model.activations import HalfLayer, LayerContext, scratch_like
from llmq.model.halves.half import ModelContext
from llmq.model.linear import Linear
from llmq.ops.experts.expert_rows import combine, combine_backward
from llmq.ops.experts.route import route, route_backward
from llmq.ops.pointwise.elementwise import add
from llmq.ops.product.matmul import matmul
from llmq.ops.product.product import ACTIVATIONS

_SIGMOID = {"kind": "sigmoid"}  # the gate is a router with one expert


class SharedKept(NamedTuple):
    """The tensors of one layer that forward keeps. gate_logits, gate: F32 (S, 1); None without a
    gate. up: (S, 2Fs), or (S, Fs) without gates. act: (S, Fs)."""

    gate_logits: Tensor | None
    gate: Tensor | None
    up: Activation
    act: Activation


class SharedExpert:
    """The shared experts of all layers. S: number of rows of the residual stream."""

    def __init__(self, shared: ModelContext):
        self.dev, self.linear, self.routers = shared.dev, shared.linear, Linear(shared.dev)
        self.operands = shared.operands
        self.activation = ACTIVATIONS[shared.config.activation]
        self.gated = shared.config.arch.shared_gated
        if self.gated:  # each row chooses the only expert
            rows = shared.options.batch.micro_tokens
            places = np.arange(rows, dtype=np.int32)[:, None]
            self._places = self.dev.constant("shared_places", places, I32, "Activations")
            self._chosen = self.dev.alloc("shared_chosen", (rows, 1), I32, "Activations")

    def keep(self, layer: HalfLayer) -> SharedKept:
        r, (up, _) = layer.recompute, layer.spec["shared_up"].shape
        _, F = layer.spec["shared_down"].shape
        gate_logits = gate = None
        if self.gated:
            gate_logits = layer.alloc("shared_gate_logits", layer.rows, 1, dtype=F32)
            gate = layer.alloc("shared_gate", layer.rows, 1, dtype=F32)
        return SharedKept(
            gate_logits=gate_logits,
            gate=gate,
            up=layer.activation("shared_up", up, kept=not r.ffn),
            act=layer.activation("shared_act", F, kept=not r.swiglu),
        )

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        """Add the shared expert's output for x (S, C) to layer.out."""
        dev, kept, out = self.dev, ctx.layer.saved.shared, ctx.layer.out.out
        if self.gated:
            matmul(dev, kept.gate_logits, tensor_of(x), ctx.w["shared_gate"], trans_b=True)
            route(dev, self._chosen, kept.gate, kept.gate_logits, **_SIGMOID)
        up, act = (each.place(dev, ctx.temps) for each in (kept.up, kept.act))
        self.linear.forward(ctx, "shared_up", up, x)
        self.activation[0](dev, act, up)
        with ExitStack() as temps:
            y, gated = scratch_like(dev, temps, "shared_out", out), act
            if self.gated:
                gated = scratch_like(dev, temps, "shared_act.gated", act)
                combine(dev, gated, act, self._places, kept.gate)
            operand = self.operands.quantize(
                temps, kept.act.tensor_id, gated, measured=False, transposed=False
            )
            self.linear.forward(ctx, "shared_down", y, operand)
            add(dev, out, out, y)

    def up_again(self, ctx: LayerContext, x: Operand | None) -> Tensor:
        """Return up (S, 2Fs), kept or recomputed."""
        up = ctx.layer.saved.shared.up.place(self.dev, ctx.temps)
        if ctx.layer.recompute.ffn:
            self.linear.forward(ctx, "shared_up", up, x)
        return up

    def needs_input(self, ctx: LayerContext) -> bool:
        return "shared_gate" in ctx.g or self.linear.needs_input(ctx, "shared_up")

    def backward(
        self, ctx: LayerContext, x: Operand | None, up: Tensor, d_out: Tensor, d_x: Tensor | None
    ) -> None:
        """Compute d_x (S, C), unless d_x is None, and the weights' gradients. The method overwrites
        `up`."""
        dev, linear, operands = self.dev, self.linear, self.operands
        layer, kept, gate = ctx.layer, ctx.layer.saved.shared, ctx.w.get("shared_gate")
        with ExitStack() as temps:
            act = kept.act.place(dev, temps)
            if kept.act.tensor is None:
                self.activation[0](dev, act, up)
            d_act = scratch_like(dev, temps, "d_shared_act", act)
            d_y = operands.quantize(temps, layer.out_id, d_out, measured=True, transposed=True)
            linear.input_gradient(ctx, "shared_down", d_act, d_y)
            if gate is not None:
                d_gate = scratch_like(dev, temps, "d_shared_gate", kept.gate)
                combine_backward(dev, d_act, d_gate, act, self._places, kept.gate, weighted=act)
            again = operands.quantize_again(temps, kept.act.tensor_id, act, product=False)
            linear.weight_gradients(ctx, "shared_down", d_y, again)
            d_up = operands.gradient_buffers(temps, layer.id_of("d_shared_up"), up.shape, up)
            self.activation[1](dev, d_up.tensor, d_act, up, abs_max=d_up.abs_max, fp8=d_up.fp8)
            d_up = operands.finalize(temps, d_up)
            linear.input_gradient(ctx, "shared_up", d_x, d_up)
            if x is not None:
                x, norm = tensor_of(x), layer.norm.out.tensor_id
                again = operands.quantize_again(temps, norm, x, product=False)
                linear.weight_gradients(ctx, "shared_up", d_up, again)
            if gate is None:
                return
            scratch = dev.scratch("d_gate_logits", kept.gate.shape, gate.dtype)
            d_logits = temps.enter_context(scratch)
            route_backward(dev, d_logits, d_gate, kept.gate_logits, self._chosen, **_SIGMOID)
            if d_x is not None:
                matmul(dev, d_x, d_logits, gate, accumulate=True)
            self.routers.weight_gradients(ctx.g.get("shared_gate"), None, d_logits, x)
