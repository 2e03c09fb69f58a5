"""The gated delta rule: linear attention over a state, forward, backward, and token by token."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import CAPABILITY, expect_float
from llmq.runtime.cost import BESIDE_ATTENTION, Cost, delta_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

SIZES = "i32 seq_len, i32 key_heads, i32 value_heads"
FILE = "delta/delta_rule.cu"
PREPARE = Kernel(
    FILE,
    "delta_rule_prepare",
    args="T* u, T* w, T*? inverse, T*? scores, f32* factors, const T* qkv, const f32* gates, "
    f"const i32*? starts, {SIZES}, i32 carried",
)
SCAN = Kernel(
    FILE,
    "delta_rule_scan",
    args="T* out, inout f32*? state, const T* qkv, const T* u, const T* w, const T* scores, "
    f"const f32* factors, {SIZES}",
)
STATES = Kernel(
    FILE,
    "delta_rule_states",
    args="T* states, T* changes, inout f32*? state, const T* qkv, const T* u, const T* w, "
    f"const f32* factors, {SIZES}",
)
SCAN_BACKWARD = Kernel(
    FILE,
    "delta_rule_scan_backward",
    args="T* d_changes, T* d_states, inout f32*? d_state, const T* d_out, const T* qkv, "
    f"const T* w, const T* scores, const f32* factors, {SIZES}",
)
GRADIENTS = Kernel(
    FILE,
    "delta_rule_gradients",
    args="T* d_qkv, f32* d_gates, const T* d_out, const T* changes, const T* d_changes, "
    "const T* states, const T* d_states, const T* inverse, const f32* factors, const T* qkv, "
    f"const f32* gates, const i32*? starts, {SIZES}, i32 carried",
)
RECURRENCE = Kernel(
    FILE,
    "delta_rule_recurrence",
    args=f"T* out, inout f32* state, const T* qkv, const f32* gates, {SIZES}",
)

# Scans on Hopper, whose tensors are matrices: rows of tokens, of chunks or of states.
SCAN_SM90 = Kernel(
    FILE,
    "delta_rule_scan_sm90",
    args="T[64]* out, inout f32*? state, const T[32]* qkv, const T[64]* u, const T[32]* w, "
    f"const T[32]* scores, const f32* factors, {SIZES}",
    capability=CAPABILITY,
)
STATES_SM90 = Kernel(
    FILE,
    "delta_rule_states_sm90",
    args="T[64]* states, T[64]* changes, inout f32*? state, const T[32]* qkv, const T[64]* u, "
    f"const T[32]* w, const f32* factors, {SIZES}",
    capability=CAPABILITY,
)
SCAN_BACKWARD_SM90 = Kernel(
    FILE,
    "delta_rule_scan_backward_sm90",
    args="T[64]* d_changes, T[64]* d_states, inout f32*? d_state, const T[64]* d_out, "
    f"const T[32]* qkv, const T[32]* w, const T[32]* scores, const f32* factors, {SIZES}",
    capability=CAPABILITY,
)
ON_HOPPER = {SCAN: SCAN_SM90, STATES: STATES_SM90, SCAN_BACKWARD: SCAN_BACKWARD_SM90}

CHUNK = 64  # tokens
THREADS, RECURRENCE_THREADS, HOPPER_THREADS = 256, 128, 192
STAGES = 4  # tiles that a scan has in shared memory
FACTORS = 6  # numbers of a token
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
        self.dtype, self.carried = qkv.dtype, int(state is not None)
        self.chunks = ceil_div(T, CHUNK)
        self.slice = 32 if DV % 64 else 64  # columns of values in a block of a scan
        # That gradients load at once, as shared memory permits.
        self.state_rows = 32 if dev.spec.capability in (90, 100) else 16
        self.consts = {"DK": DK, "DV": DV, "STATE_ROWS": self.state_rows}
        self.sizes = (T, Hk, Hv)

    @contextmanager
    def scratch(self, *wanted: str) -> Iterator[list[Tensor]]:
        """Tensors of all chunks, by their names."""
        DK, DV = self.heads.DK, self.heads.DV
        rows = {"factors": (FACTORS, CHUNK), "u": (CHUNK, DV), "w": (CHUNK, DK)}
        rows |= dict.fromkeys(("scores", "inverse"), (CHUNK, CHUNK))
        rows["changes"] = (CHUNK, DV)
        rows |= dict.fromkeys(("states", "d_states"), (DV, DK))
        with ExitStack() as temps:
            yield [
                temps.enter_context(
                    self.dev.scratch(
                        f"delta {name}",
                        (self.B, self.heads.Hv, self.chunks, *rows[name]),
                        F32 if name == "factors" else self.dtype,
                    )
                )
                for name in wanted
            ]

    def launch(
        self, kernel: Kernel, grid: tuple, threads: int, args: tuple, shared: int, fmas: int
    ) -> None:
        """shared: bytes. fmas: for a token and a value head."""
        cost = self.cost(kernel, fmas)
        self.dev.launch(kernel, grid, threads, args, consts=self.consts, smem=shared, cost=cost)

    def cost(self, kernel: Kernel, fmas: int) -> Cost:
        """fmas: for a token and a value head."""
        flops = 2 * fmas * self.B * self.T * self.heads.Hv
        sizes = (self.T, self.heads.DK, self.B * self.heads.Hv)
        return delta_cost(kernel, self.dtype, flops, sizes)

    def each_chunk(self, kernel: Kernel, heads: int, args: tuple, shared: int, fmas: int) -> None:
        """heads: of the grid."""
        grid, args = (heads, self.B, self.chunks), (*args, *self.sizes, self.carried)
        cost = self.cost(kernel, fmas)
        self.dev.launch(kernel, grid, THREADS, args, consts=self.consts, smem=shared, cost=cost)

    def tiles(self, rows: int, *widths: int) -> int:
        """Bytes of tiles of BF16 in shared memory; those of F32 stay where they are."""
        return 2 * rows * sum(width + 8 for width in widths) if self.dtype is BF16 else 0

    def prepare(self, made: tuple, inputs: tuple) -> None:
        """made: u, w, inverse, scores, factors, as the kernel takes them."""
        _, Hv, DK, DV = self.heads
        shared = CHUNK * (CHUNK + 8) * 4 + self.tiles(CHUNK, DK, max(DK, DV))
        self.each_chunk(PREPARE, Hv, (*made, *inputs), shared, CHUNK * (3 * DK + DV))

    def on_hopper(self) -> bool:
        """Whether scans are those of delta_sm90.cuh. They load 64 tokens at once, of which none may
        be of the next sequence."""
        _, _, DK, DV = self.heads
        fits = self.dtype is BF16 and DK % 64 == 0 and DV == 128
        whole = self.B == 1 or self.T % CHUNK == 0
        return self.dev.spec.capability == CAPABILITY and fits and whole

    def scan(self, kernel: Kernel, args: tuple, products: int) -> None:
        """products: those of a state."""
        _, Hv, DK, DV = self.heads
        fmas = products * DK * DV + (products - 2) * CHUNK * DV
        grid, threads = (DV // self.slice, Hv, self.B), 2 * self.slice
        if self.on_hopper():
            box, keys = CHUNK * 64 * self.dtype.itemsize, DK // 64
            stages, results = (4 if kernel is STATES else 3), (0 if kernel is SCAN else keys) + 1
            stage = (products * keys + products - 1) * box + 4 * CHUNK * F32.itemsize
            shared = stages * stage + results * box + 8 * (2 * stages + 4) + 1024
            kernel, threads = ON_HOPPER[kernel], HOPPER_THREADS
            args = tuple(
                x.view(x.size // x.shape[-1], x.shape[-1]) if declared.box_rows else x
                for x, declared in zip(args, kernel.declared, strict=False)
            )
        else:
            shared = CHUNK * (self.slice + 8) * self.dtype.itemsize  # results of a chunk
            in_f32 = DK * self.slice * F32.itemsize  # the state
            tiles = STAGES * self.tiles(CHUNK, max(DK, CHUNK))
            shared += in_f32 if self.dtype is F32 else tiles
        self.launch(kernel, grid, threads, (*args, *self.sizes), shared, fmas)


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
        gates   in     F32 (B,T,2,Hv)             decays, at most 0, and betas; chunks take decays
                                                  below -128, where exp is 0, as -128
        starts  in     I32 (B,T) or None          where each one's document starts; None: 0
        state   inout  F32 (B,Hv,DK,DV) or None   of the text before, then of it and this one; None:
                                                  0, and it is not kept; not with starts

    Cost:    64 * (3 DK + 2 DV) + 3 DK DV FMAs for a token and a value head, on tensor cores; two
             launches.
    Workspace: 64 + DK + DV elements of T and 6 F32 for a token and a value head.
    """
    op = "delta_rule.forward"
    call = _Call(op, dev, qkv, gates, heads, starts, state)
    expect(op, "out", out, qkv.dtype, (call.B, call.T, heads.Hv * heads.DV))
    with call.scratch("u", "w", "scores", "factors") as (u, w, scores, factors):
        call.prepare((u, w, None, scores, factors), (qkv, gates, starts))
        call.scan(SCAN, (out, state, qkv, u, w, scores, factors), 3)


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
        d_gates  out    F32 as gates; 0 for betas of 0, where sigmoid's slope is 0
        d_out    in     T   as out
        state    inout  as in front of the text, then behind it; needs d_state
        d_state  inout  F32 as state    gradient of the state behind, then of that in front

    Cost:    64 * (7 DK + 5 DV) + 8 DK DV FMAs for a token and a value head, on tensor cores; four
             launches.
    Workspace: 2 * 64 + DK + 2 DV + 2 DK DV / 64 elements of T and 6 F32 for a token and a value
             head.
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
    names = ("u", "w", "inverse", "scores", "factors")
    with call.scratch(*names, "states", "changes", "d_states") as (
        *made,
        states,
        changes,
        d_states,
    ):
        u, w, inverse, scores, factors = made
        d_changes = u  # which nobody reads behind the states
        call.prepare(tuple(made), (qkv, gates, starts))
        call.scan(STATES, (states, changes, state, qkv, u, w, factors), 2)
        call.scan(SCAN_BACKWARD, (d_changes, d_states, d_state, d_out, qkv, w, scores, factors), 3)
        wide, item = max(DK, DV) + 8, qkv.dtype.itemsize
        squares = 2 if qkv.dtype is BF16 else 3
        call.each_chunk(
            GRADIENTS,
            Hk,
            (d_qkv, d_gates, d_out, changes, d_changes, states, d_states, inverse, factors, qkv,
             gates, starts),
            CHUNK * (wide + squares * (CHUNK + 8)) * item
            + call.tiles(CHUNK, wide - 8, wide - 8, DV) + call.tiles(2 * call.state_rows, wide - 8),
            3 * DK * DV + CHUNK * (3 * DV + 4 * DK),
        )  # fmt: skip


def recurrence(
    dev: Device, out: Tensor, state: Tensor, qkv: Tensor, gates: Tensor, heads: Heads
) -> None:
    """As forward with a state, token by token: for the few tokens that a text is continued by."""
    op = "delta_rule.recurrence"
    call = _Call(op, dev, qkv, gates, heads, None, state)
    expect(op, "out", out, qkv.dtype, (call.B, call.T, heads.Hv * heads.DV))
    args, grid = (out, state, qkv, gates, *call.sizes), (ceil_div(heads.DV, 32), heads.Hv, call.B)
    threads, cost = RECURRENCE_THREADS, BESIDE_ATTENTION
    dev.launch(RECURRENCE, grid, threads, args, consts=call.consts, cost=cost)
