"""The gated delta rule: linear attention over a state, forward, backward, and token by token."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from llmq.base.dtypes import F32, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.cost import Cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

SIZES = "i32 seq_len, i32 key_heads, i32 value_heads"
SOLVE = Kernel(
    "delta_rule.cu",
    "delta_rule_solve",
    args="f32* inverse, f32*? scores, const T* qkv, const f32* gates, const i32*? starts, "
    f"{SIZES}, i32 carried",
)
SCAN = Kernel(
    "delta_rule.cu",
    "delta_rule_scan",
    args="T*? out, f32*? states, f32*? changes, inout f32*? state, const T* qkv, "
    f"const f32* gates, const f32* inverse, const f32*? scores, const i32*? starts, {SIZES}",
)
SCAN_BACKWARD = Kernel(
    "delta_rule.cu",
    "delta_rule_scan_backward",
    args="f32* d_rests, f32* d_states, inout f32*? d_state, const T* d_out, const T* qkv, "
    "const f32* gates, const f32* inverse, const f32* scores, const i32*? starts, "
    f"{SIZES}, i32 carried",
)
GRADIENTS = Kernel(
    "delta_rule.cu",
    "delta_rule_gradients",
    args="T* d_qkv, f32* d_gates, const T* d_out, const f32* changes, const f32* d_rests, "
    "const f32* states, const f32* d_states, const T* qkv, const f32* gates, "
    f"const i32*? starts, {SIZES}, i32 carried",
)
RECURRENCE = Kernel(
    "delta_rule.cu",
    "delta_rule_recurrence",
    args=f"T* out, inout f32* state, const T* qkv, const f32* gates, {SIZES}",
)

CHUNK, SLICE = 64, 32  # tokens; columns of a state in a block
THREADS, RECURRENCE_THREADS = 256, 128
MULTIPLE, MAX_HEAD = 32, 128  # of DK and DV
FEW_TOKENS = 8  # for which steps are less work than a chunk


class Heads(NamedTuple):
    """Hk: of queries and keys, DK channels each. Hv: of values and states, DV channels each."""

    Hk: int
    Hv: int
    DK: int
    DV: int

    @property
    def channels(self) -> int:
        """Those of queries, keys and values together."""
        return 2 * self.Hk * self.DK + self.Hv * self.DV


class _Call:
    """The launches for tensors that fit."""

    def __init__(
        self,
        op: str,
        dev: Device,
        qkv: Tensor,
        gates: Tensor,
        heads: Heads,
        starts: Tensor | None,
        state: Tensor | None,
    ):
        Hk, Hv, DK, DV = heads
        on_gpu = dev.spec.capability > 0
        if on_gpu and any(d % MULTIPLE or not 0 < d <= MAX_HEAD for d in (DK, DV)):
            raise ValueError(
                f"{op}: DK and DV must be multiples of {MULTIPLE} up to {MAX_HEAD} on a GPU, "
                f"got {DK} and {DV}"
            )
        if Hv % Hk:
            raise ValueError(f"{op}: {Hk} key heads do not divide {Hv} value heads")
        expect_float(op, "qkv", qkv)
        if len(qkv.shape) != 3 or qkv.shape[2] != heads.channels:
            raise ValueError(f"{op}: qkv must have shape (B, T, {heads.channels}), got {qkv.shape}")
        B, T, _ = qkv.shape
        expect(op, "gates", gates, F32, (B, T, 2, Hv))
        if starts is not None:
            expect(op, "starts", starts, I32, (B, T))
        if state is not None:
            expect(op, "state", state, F32, (B, Hv, DK, DV))
            if starts is not None:
                raise ValueError(f"{op}: a state belongs to one document, starts must be None")
        self.dev, self.heads, self.B, self.T = dev, heads, B, T
        self.chunks = ceil_div(T, CHUNK)
        self.sizes = (T, Hk, Hv)
        self.consts = {"DK": DK, "DV": DV}
        self.by_chunk = (self.chunks, Hv, B)
        self.by_slice = (ceil_div(DV, SLICE), Hv, B)

    def squares(self) -> tuple[int, ...]:
        return (self.B, self.heads.Hv, self.chunks, CHUNK, CHUNK)

    def states(self) -> tuple[int, ...]:
        return (self.B, self.heads.Hv, self.chunks, self.heads.DK, self.heads.DV)

    def changes(self) -> tuple[int, ...]:
        return (self.B, self.T, self.heads.Hv, self.heads.DV)

    def launch(self, kernel: Kernel, grid: tuple, args: tuple, floats: int, fmas: int) -> None:
        """floats: of shared memory. fmas: for a token and a value head."""
        flops = 2 * fmas * self.B * self.T * self.heads.Hv
        cost = Cost(part="attention", flops=flops, rate="delta")
        self.dev.launch(kernel, grid, THREADS, args, consts=self.consts, smem=4 * floats, cost=cost)

    def solve(
        self, inverse: Tensor, scores: Tensor | None, inputs: tuple, starts: object, carried: int
    ) -> None:
        DK = self.heads.DK
        args = (inverse, scores, *inputs, starts, *self.sizes, carried)
        floats = 2 * CHUNK * (DK + 1) + CHUNK * (CHUNK + 1)
        self.launch(SOLVE, self.by_chunk, args, floats, 2 * CHUNK * DK + 21 * CHUNK)

    def scan(self, made: tuple, inputs: tuple, solved: tuple, starts: object) -> None:
        DK, DV = self.heads.DK, self.heads.DV
        out = int(made[0] is not None)
        floats = CHUNK * DK + CHUNK * CHUNK + (DK + CHUNK) * SLICE
        fmas = (2 + out) * DK * DV + (1 + out) * CHUNK * DV
        args = (*made, *inputs, *solved, starts, *self.sizes)
        self.launch(SCAN, self.by_slice, args, floats, fmas)


def forward(
    dev: Device,
    out: Tensor,
    qkv: Tensor,
    gates: Tensor,
    heads: Heads,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> None:
    """out[t] = S^T q[t] / sqrt(DK), of a state S for each value head that every token changes.

        S = S * exp(decay[t])                   0 where a document begins
        S = S + k[t] (beta[t] * (v[t] - S^T k[t]))^T

    Value head h has the queries and keys of head h * Hk // Hv; they are divided by their lengths.

    Args:
        out     out    T   (B,T,Hv*DV)            F32 or BF16
        qkv     in     T   (B,T,2*Hk*DK+Hv*DV)    all queries, all keys, all values; DK, DV
                                                  multiples of 32 up to 128 (on a GPU)
        gates   in     F32 (B,T,2,Hv)             decays, at most 0, and betas
        starts  in     I32 (B,T) or None          where each one's document starts; None: 0
        state   inout  F32 (B,Hv,DK,DV) or None   of the text before, then of it and this one; None:
                                                  0, and it is not kept; not with starts

    Cost:    64 * (2 DK + 2 DV) + 3 DK DV F32 FMAs for a token and a value head; two launches.
    Workspace: 2 * 64 F32 for a token and a value head.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "delta_rule.forward"
    call = _Call(op, dev, qkv, gates, heads, starts, state)
    expect(op, "out", out, qkv.dtype, (call.B, call.T, heads.Hv * heads.DV))
    with (
        dev.scratch("delta inverse", call.squares(), F32) as inverse,
        dev.scratch("delta scores", call.squares(), F32) as scores,
    ):
        call.solve(inverse, scores, (qkv, gates), starts, int(state is not None))
        call.scan((out, None, None, state), (qkv, gates), (inverse, scores), starts)


def backward(
    dev: Device,
    d_qkv: Tensor,
    d_gates: Tensor,
    d_out: Tensor,
    qkv: Tensor,
    gates: Tensor,
    heads: Heads,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    d_state: Tensor | None = None,
) -> None:
    """The gradients of forward's inputs; what it computed is computed again.

    Args as forward's, and
        d_qkv    out    T   as qkv
        d_gates  out    F32 as gates
        d_out    in     T   as out
        state    inout  as in front of the text, then behind it; needs d_state
        d_state  inout  F32 as state    gradient of the state behind, then of that in front

    Cost:    as forward, and 9 DK DV + 64 * (9 DK + 4 DV) F32 FMAs for a token and a value head;
             four launches.
    Workspace: 2 * (64 + DV) + 2 DK DV / 64 F32 for a token and a value head.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "delta_rule.backward"
    call = _Call(op, dev, qkv, gates, heads, starts, state)
    Hk, Hv, DK, DV = heads
    expect(op, "d_qkv", d_qkv, qkv.dtype, qkv.shape)
    expect(op, "d_gates", d_gates, F32, gates.shape)
    expect(op, "d_out", d_out, qkv.dtype, (call.B, call.T, Hv * DV))
    if (state is None) != (d_state is None):
        raise ValueError(f"{op}: state and d_state are given together, or none of them")
    if d_state is not None:
        expect(op, "d_state", d_state, F32, state.shape)
    inputs, carried = (qkv, gates), int(state is not None)
    with ExitStack() as temps:

        def scratch(name: str, shape: tuple[int, ...]) -> Tensor:
            return temps.enter_context(dev.scratch(f"delta {name}", shape, F32))

        states, d_states = (scratch(name, call.states()) for name in ("states", "d_states"))
        changes, d_rests = (scratch(name, call.changes()) for name in ("changes", "d_rests"))
        solved = inverse, scores = [scratch(n, call.squares()) for n in ("inverse", "scores")]
        call.solve(inverse, scores, inputs, starts, carried)
        call.scan((None, states, changes, state), inputs, tuple(solved), starts)
        call.launch(
            SCAN_BACKWARD, call.by_slice,
            (d_rests, d_states, d_state, d_out, *inputs, *solved, starts, *call.sizes, carried),
            CHUNK * DK + CHUNK * CHUNK + (DK + 2 * CHUNK) * SLICE, 3 * DK * DV + 2 * CHUNK * DV,
        )  # fmt: skip
        found = (changes, d_rests, states, d_states)
        call.launch(
            GRADIENTS, (call.chunks, Hk, call.B),
            (d_qkv, d_gates, d_out, *found, *inputs, starts, *call.sizes, carried),
            max(2 * CHUNK * (DK + 1) + 2 * CHUNK * CHUNK, 3 * CHUNK * (SLICE + 1)),
            3 * DK * DV + CHUNK * (6 * DK + 2 * DV),
        )  # fmt: skip


def recurrence(
    dev: Device, out: Tensor, state: Tensor, qkv: Tensor, gates: Tensor, heads: Heads
) -> None:
    """As forward with a state, token by token: for the few tokens that a text is continued by.

    Cost:    a read and a write of the state, and what T steps take; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "delta_rule.recurrence"
    call = _Call(op, dev, qkv, gates, heads, None, state)
    expect(op, "out", out, qkv.dtype, (call.B, call.T, heads.Hv * heads.DV))
    cost = Cost(part="attention")
    args = (out, state, qkv, gates, *call.sizes)
    threads, consts = RECURRENCE_THREADS, call.consts
    dev.launch(RECURRENCE, call.by_slice, threads, args, consts=consts, cost=cost)
