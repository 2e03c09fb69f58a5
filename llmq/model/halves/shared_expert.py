"""The expert that every token meets beside those that its router chooses, behind a gate.

    x -> shared_up -> swiglu -> * sigmoid(x @ shared_gate) -> shared_down -> added to out

Architectures have the gate behind shared_down. In front of it, it is the same factor, and backward
needs no output of shared_down.
"""

from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import F32, I32
from llmq.base.operand import Operand, OutputForms, tensor_of
from llmq.base.tensor import Tensor
from llmq.formats.format import Activation
from llmq.model.activations import Frame, HalfLayer, scratch_like
from llmq.model.halves.half import Shared
from llmq.model.linear import Linear
from llmq.ops import swiglu
from llmq.ops.elementwise import add
from llmq.ops.expert_rows import combine, combine_backward
from llmq.ops.matmul import matmul
from llmq.ops.route import route, route_backward

_SIGMOID = {"kind": "sigmoid"}  # of a router with one expert


class SharedKept(NamedTuple):
    """The tensors kept of one layer. gate_logits, gate: F32 (S, 1). up: (S, 2Fs). act: (S, Fs)."""

    gate_logits: Tensor
    gate: Tensor
    up: Activation
    act: Activation


class SharedExpert:
    """The shared experts of all layers, of S rows of the stream."""

    def __init__(self, shared: Shared):
        self.dev, self.linear, self.routers = shared.dev, shared.linear, Linear(shared.dev)
        self.operands = shared.operands
        rows = shared.options.batch_size * shared.options.local_seq_len
        # Each row is its own only choice.
        self._places = self.dev.alloc("shared_places", (rows, 1), I32, "Activations")
        self._chosen = self.dev.alloc("shared_chosen", (rows, 1), I32, "Activations")
        self.dev.upload(self._places, np.arange(rows, dtype=np.int32)[:, None])

    def keep(self, here: HalfLayer) -> SharedKept:
        r, (_, F) = here.recompute, here.spec["shared_down"].shape
        return SharedKept(
            gate_logits=here.alloc("shared_gate_logits", here.rows, 1, dtype=F32),
            gate=here.alloc("shared_gate", here.rows, 1, dtype=F32),
            up=here.activation("shared_up", 2 * F, kept=not r.ffn),
            act=here.activation("shared_act", F, kept=not r.swiglu),
        )

    def forward(self, at: Frame, x: Operand) -> None:
        """Adds to here.out, from x (S, C)."""
        dev, kept, out = self.dev, at.here.kept.shared, at.here.out.out
        matmul(dev, kept.gate_logits, tensor_of(x), at.w["shared_gate"], trans_b=True)
        route(dev, self._chosen, kept.gate, kept.gate_logits, **_SIGMOID)
        up, act = (each.place(dev, at.temps) for each in (kept.up, kept.act))
        self.linear.forward(at, "shared_up", up, x)
        swiglu.forward(dev, act, up)
        with ExitStack() as temps:
            gated = scratch_like(dev, temps, "shared_act.gated", act)
            y = scratch_like(dev, temps, "shared_out", out)
            combine(dev, gated, act, self._places, kept.gate)
            how = {"measured": False, "transposed": False}
            operand = self.operands.of_tensor(temps, kept.act.tensor_id, gated, **how)
            self.linear.forward(at, "shared_down", y, operand)
            add(dev, out, out, y)

    def up_again(self, at: Frame, x: Operand | None) -> Tensor:
        """up (S, 2Fs), kept or computed again."""
        up = at.here.kept.shared.up.place(self.dev, at.temps)
        if at.here.recompute.ffn:
            self.linear.forward(at, "shared_up", up, x)
        return up

    def needs_input(self, at: Frame) -> bool:
        return "shared_gate" in at.g or self.linear.needs_input(at, "shared_up")

    def backward(
        self, at: Frame, x: Operand | None, up: Tensor, d_out: Tensor, d_x: Tensor | None
    ) -> None:
        """d_x (S, C), if it is wanted, and the weights' gradients; overwrites up."""
        dev, linear, operands = self.dev, self.linear, self.operands
        here, kept, gate = at.here, at.here.kept.shared, at.w["shared_gate"]
        with ExitStack() as temps:
            act = kept.act.place(dev, temps)
            if kept.act.tensor is None:
                swiglu.forward(dev, act, up)
            d_act = scratch_like(dev, temps, "d_shared_act", act)
            d_gate = scratch_like(dev, temps, "d_shared_gate", kept.gate)
            how = {"measured": True, "transposed": True}
            d_y = operands.of_tensor(temps, here.out_id, d_out, **how)
            linear.input_gradient(at, "shared_down", d_act, d_y)
            combine_backward(dev, d_act, d_gate, act, self._places, kept.gate, weighted=act)
            again = operands.of_tensor_again(temps, kept.act.tensor_id, act, product=False)
            linear.weight_gradients(at, "shared_down", d_y, again)

            def write(to: OutputForms) -> None:
                swiglu.backward(dev, to.out, d_act, up, abs_max=to.abs_max, fp8=to.fp8)

            how = {"shape": up.shape, "out": up}
            d_up = operands.gradient(temps, here.id_of("d_shared_up"), write, **how)
            linear.input_gradient(at, "shared_up", d_x, d_up)
            if x is not None:
                x, norm = tensor_of(x), here.norm.out.tensor_id
                again = operands.of_tensor_again(temps, norm, x, product=False)
                linear.weight_gradients(at, "shared_up", d_up, again)
            scratch = dev.scratch("d_gate_logits", kept.gate.shape, gate.dtype)
            d_logits = temps.enter_context(scratch)
            route_backward(dev, d_logits, d_gate, kept.gate_logits, self._chosen, **_SIGMOID)
            if d_x is not None:
                matmul(dev, d_x, d_logits, gate, accumulate=True)
            self.routers.weight_gradients(at.g.get("shared_gate"), None, d_logits, x)
