"""The gated delta rule: linear attention over a state, forward, backward, and token by token."""

from dataclasses import replace

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Tensor
from llmq.ops.common import CAPABILITY, CHUNK, ChunkedCall, Heads
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

MULTIPLE, MAX_HEAD = 32, 128  # divisor and maximum of DK and DV
SIZES = "i32 seq_len, i32 key_heads, i32 value_heads"
FILE = "delta/delta_rule.cu"
QKV = "T[B,seq_len,2*key_heads*DK + value_heads*DV]"
OUT = "T[B,seq_len,value_heads*DV]"
GATES = "f32[B,seq_len,2,value_heads]"
STATE = "f32[B,value_heads,DK,DV]"
# Shapes of tensors with a part for each chunk of a sequence.
FACTORS_OF = "f32[B,value_heads,chunks,6,64]"
KEYS, VALUES = "T[B,value_heads,chunks,64,DK]", "T[B,value_heads,chunks,64,DV]"
SQUARES, STATES_OF = "T[B,value_heads,chunks,64,64]", "T[B,value_heads,chunks,DV,DK]"
_RULES = {
    "where": "value_heads % key_heads",
    "gpu": f"DK % {MULTIPLE}, DK <= {MAX_HEAD}, DV % {MULTIPLE}, DV <= {MAX_HEAD}",
}
PREPARE = Kernel(
    FILE,
    "delta_rule_prepare",
    f"out {VALUES} u, out {KEYS} w, out {SQUARES}? inverse, out {SQUARES}? scores, "
    f"out {FACTORS_OF} factors, {QKV} qkv, {GATES} gates, i32[B,seq_len]? starts, {SIZES}, "
    "i32 carried",
    **_RULES,
)
SCAN = Kernel(
    FILE,
    "delta_rule_scan",
    f"out {OUT} out, inout {STATE}? state, {QKV} qkv, {VALUES} u, {KEYS} w, {SQUARES} scores, "
    f"{FACTORS_OF} factors, {SIZES}",
)
STATES = Kernel(
    FILE,
    "delta_rule_states",
    f"out {STATES_OF} states, out {VALUES} changes, inout {STATE}? state, {QKV} qkv, {VALUES} u, "
    f"{KEYS} w, {FACTORS_OF} factors, {SIZES}",
)
SCAN_BACKWARD = Kernel(
    FILE,
    "delta_rule_scan_backward",
    f"out {VALUES} d_changes, out {STATES_OF} d_states, inout {STATE}? d_state, {OUT} d_out, "
    f"{QKV} qkv, {KEYS} w, {SQUARES} scores, {FACTORS_OF} factors, {SIZES}",
)
GRADIENTS = Kernel(
    FILE,
    "delta_rule_gradients",
    f"out {QKV} d_qkv, out {GATES} d_gates, {OUT} d_out, {VALUES} changes, {VALUES} d_changes, "
    f"{STATES_OF} states, {STATES_OF} d_states, {SQUARES} inverse, {FACTORS_OF} factors, "
    f"{QKV} qkv, {GATES} gates, i32[B,seq_len]? starts, {SIZES}, i32 carried",
)
RECURRENCE = Kernel(
    FILE,
    "delta_rule_recurrence",
    f"out {OUT} out, inout {STATE} state, {QKV} qkv, {GATES} gates, {SIZES}",
    **_RULES,
)


def _on_hopper(kernel: Kernel, **box_rows: int) -> Kernel:
    """The version of a scan in delta_sm90.cuh, which reads tensors as TMA matrices. box_rows: by
    name of such a tensor, rows of a TMA box."""
    args = []
    for text, arg in zip(kernel.args.split(", "), kernel.declared, strict=True):
        if rows := box_rows.get(arg.name):
            access = text.partition("T[")[0]
            *leading, last = (dim.text for dim in arg.shape)
            text = f"box{rows} {access}T[{'*'.join(leading)},{last}] {arg.name}"
        args.append(text)
    entry = f"{kernel.entry}_sm90"
    return replace(kernel, entry=entry, args=", ".join(args), capability=CAPABILITY)


SCAN_SM90 = _on_hopper(SCAN, out=64, qkv=32, u=64, w=32, scores=32)
STATES_SM90 = _on_hopper(STATES, states=64, changes=64, qkv=32, u=64, w=32)
SCAN_BACKWARD_SM90 = _on_hopper(
    SCAN_BACKWARD, d_changes=64, d_states=64, d_out=64, qkv=32, w=32, scores=32
)
ON_HOPPER = {SCAN: SCAN_SM90, STATES: STATES_SM90, SCAN_BACKWARD: SCAN_BACKWARD_SM90}

THREADS, RECURRENCE_THREADS, HOPPER_THREADS = 256, 128, 192
STAGES = 4  # number of a scan's tiles in shared memory
FACTORS = 6  # F32 numbers per token and value head
FEW_TOKENS = 8  # most tokens for which `recurrence` is less work than a chunk


class _Call(ChunkedCall):
    """Sizes and launches of one call."""

    name = "delta"

    def __init__(
        self,
        op: str,
        dev: Device,
        qkv: Tensor,
        heads: Heads,
        starts: Tensor | None,
        state: Tensor | None,
    ):
        PREPARE.dims(qkv=qkv)
        super().__init__(op, dev, qkv, heads, starts, state)
        DK, DV = heads.DK, heads.DV
        self.slice = 32 if DV % 64 else 64  # columns of values in a block of a scan
        # Rows of a state that GRADIENTS loads at once, as shared memory permits.
        self.state_rows = 32 if dev.spec.capability in (90, 100) else 16
        self.consts = {"DK": DK, "DV": DV, "STATE_ROWS": self.state_rows}
        self.shapes = {"factors": (FACTORS, CHUNK), "w": (CHUNK, DK)}
        self.shapes |= dict.fromkeys(("u", "changes"), (CHUNK, DV))
        self.shapes |= dict.fromkeys(("scores", "inverse"), (CHUNK, CHUNK))
        self.shapes |= dict.fromkeys(("states", "d_states"), (DV, DK))

    def each_chunk(self, kernel: Kernel, heads: int, args: tuple, shared: int, fmas: int) -> None:
        """Launch a thread block per head, sequence and chunk. heads: Hk or Hv. shared: bytes of
        shared memory. fmas: multiplications with addition per token and value head."""
        grid, args = (heads, self.B, self.chunks), (*args, *self.sizes, self.carried)
        cost = self.cost(kernel, fmas)
        self.dev.launch(kernel, grid, THREADS, args, consts=self.consts, smem=shared, cost=cost)

    def prepare(self, made: tuple, inputs: tuple) -> None:
        """Launch PREPARE. made: its outputs u, w, inverse, scores, factors. inputs: qkv, gates,
        starts."""
        _, Hv, DK, DV = self.heads
        shared = CHUNK * (CHUNK + 8) * 4 + self.tiles(CHUNK, DK, max(DK, DV))
        self.each_chunk(PREPARE, Hv, (*made, *inputs), shared, CHUNK * (3 * DK + DV))

    def on_hopper(self) -> bool:
        """True if kernels of delta_sm90.cuh scan. A TMA box of 64 tokens must not reach the next
        sequence."""
        _, _, DK, DV = self.heads
        fits = self.dtype is BF16 and DK % 64 == 0 and DV == 128
        whole = self.B == 1 or self.T % CHUNK == 0
        return self.dev.spec.capability == CAPABILITY and fits and whole

    def scan(self, kernel: Kernel, args: tuple, products: int) -> None:
        """Launch a scan over chunks. products: matrix products with a state in each chunk."""
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
        args, cost = (*args, *self.sizes), self.cost(kernel, fmas)
        self.dev.launch(kernel, grid, threads, args, consts=self.consts, smem=shared, cost=cost)


def forward(
    dev: Device,
    out: Tensor,
    qkv: Tensor,
    gates: Tensor,
    heads: Heads,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> None:
    """out[t] = S^T q[t] / sqrt(DK). Every token changes the state S (DK, DV) of each value head.

        S = S * exp(decay[t])                   0 where a document begins
        S = S + k[t] (beta[t] * (v[t] - S^T k[t]))^T

    Value head h has the queries and keys of head h * Hk // Hv, divided by their lengths.

    qkv: all queries, all keys, all values. gates: decays, at most 0, and betas. starts: position
    where each token's document starts; None: 0. state: S before the first token, overwritten with S
    behind the last token; needs starts None. None: S begins at 0 and is not kept.

    Cost:    64 * (3 DK + 2 DV) + 3 DK DV FMAs per token and value head, on tensor cores; two
             launches.
    Workspace: 64 + DK + DV elements of T and 6 F32 per token and value head.
    """
    call = _Call("delta_rule.forward", dev, qkv, heads, starts, state)
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
    """Gradients of forward's inputs. Tensors of chunks are computed again.

    state: S before the first token, overwritten with S behind the last token. d_state: gradient of
    S behind the last token, overwritten with the gradient of S before the first token. Give state
    and d_state both, or none.

    Cost:    64 * (7 DK + 5 DV) + 8 DK DV FMAs per token and value head, on tensor cores; four
             launches.
    Workspace: 2 * 64 + DK + 2 DV + 2 DK DV / 64 elements of T and 6 F32 per token and value head.
    """
    op = "delta_rule.backward"
    call = _Call(op, dev, qkv, heads, starts, state)
    Hk, _, DK, DV = heads
    if (state is None) != (d_state is None):
        raise ValueError(f"{op}: state and d_state are given together, or none of them")
    names = ("u", "w", "inverse", "scores", "factors", "states", "changes", "d_states")
    with call.scratch(*names) as (u, w, inverse, scores, factors, states, changes, d_states):
        d_changes = u  # no launch reads u after STATES
        call.prepare((u, w, inverse, scores, factors), (qkv, gates, starts))
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
    """Compute `forward` with a state token by token, for decoding."""
    call = _Call("delta_rule.recurrence", dev, qkv, heads, None, state)
    dev.launch(
        RECURRENCE,
        (ceil_div(heads.DV, 32), heads.Hv, call.B),
        RECURRENCE_THREADS,
        (out, state, qkv, gates, *call.sizes),
        consts=call.consts,
        cost=BESIDE_ATTENTION,
    )
