"""Mamba-2's state space (SSD), a delta rule without correction: forward, backward, recurrence."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import CHUNK, VECTOR_BYTES, ChunkedCall, Heads, finish_column_sum
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

FILE = "delta/ssd.cu"
# Divisor of DK and DV, and the largest DK and DV that shared memory permits.
MULTIPLE, MAX_KEY, MAX_VALUE = 32, 128, 64
SIZES = "i32 seq_len, i32 key_heads, i32 value_heads"
QKV = "T[B,seq_len,2*key_heads*DK + value_heads*DV]"
OUT, GATES = "T[B,seq_len,value_heads*DV]", "f32[B,seq_len,2,value_heads]"
STATE = "f32[B,value_heads,DK,DV]"
# Shapes of tensors with a part for each chunk of a sequence.
SQUARES, STATES_OF = "T[B,value_heads,chunks,64,64]", "T[B,value_heads,chunks,DV,DK]"
FACTORS = "f32[B,value_heads,chunks,2,64]"
_QKV, _OUT = "T[B,seq_len,columns]", "T[B,seq_len,width]"  # for kernels that do not know DK and DV
_STARTS = "i32[B,seq_len]? starts"
_RULES = {
    "where": "value_heads % key_heads",
    "gpu": f"DK % {MULTIPLE}, DK <= {MAX_KEY}, DV % {MULTIPLE}, DV <= {MAX_VALUE}",
}
PREPARE = Kernel(
    FILE,
    "ssd_prepare",
    f"out {SQUARES} scores, out {FACTORS} factors, {_QKV} qkv, {GATES} gates, "
    f"T[value_heads] skip, {_STARTS}, {SIZES}, i32 carried",
    where=_RULES["where"],
)
SCAN = Kernel(
    FILE,
    "ssd_scan",
    f"out {_OUT} out, inout {STATE}? state, {_QKV} qkv, {SQUARES} scores, {FACTORS} factors, "
    f"{SIZES}",
    where=_RULES["where"],
)
STATES = Kernel(
    FILE,
    "ssd_states",
    f"out {STATES_OF} states, inout {STATE}? state, {QKV} qkv, {FACTORS} factors, {SIZES}",
    **_RULES,
)
SCAN_BACKWARD = Kernel(
    FILE,
    "ssd_scan_backward",
    f"out {QKV} d_qkv, out {STATES_OF} d_states, inout {STATE}? d_state, {OUT} d_out, {QKV} qkv, "
    f"{SQUARES} scores, {FACTORS} factors, {SIZES}",
    **_RULES,
)
GRADIENTS = Kernel(
    FILE,
    "ssd_gradients",
    f"out T[parts,B,seq_len,2*key_heads*DK] d_keys, out {GATES} d_gates, "
    "out f32[B,chunks,value_heads] skip_partial, "
    f"{OUT} d_out, {STATES_OF} states, {STATES_OF} d_states, {QKV} qkv, {GATES} gates, {_STARTS}, "
    f"{SIZES}, i32 carried",
    **_RULES,
)
SUM = Kernel(
    FILE,
    "ssd_sum",
    "inout T[*rows,columns] d_qkv, T[parts,*rows,keys] d_keys, i64 rows, i32 parts, i32 keys, "
    "i32 columns",
    where="keys <= columns",
)
RECURRENCE = Kernel(
    FILE,
    "ssd_recurrence",
    f"out {OUT} out, inout {STATE} state, {QKV} qkv, {GATES} gates, T[value_heads] skip, {SIZES}",
    **_RULES,
)

THREADS, RECURRENCE_THREADS = 256, 128
STAGES = 4  # number of a scan's tiles in shared memory
HEADS = 8  # value heads that one block of PREPARE or GRADIENTS computes


class _Call(ChunkedCall):
    """Sizes and launches of one call."""

    name = "ssd"

    def __init__(
        self,
        op: str,
        dev: Device,
        qkv: Tensor,
        heads: Heads,
        starts: Tensor | None,
        state: Tensor | None,
    ):
        _, Hv, DK, DV = heads
        expect(op, "qkv", qkv, None, (*qkv.shape[:2], heads.channels))
        super().__init__(op, dev, qkv, heads, starts, state)
        self.consts = {"DK": DK, "DV": DV}
        self.parts = ceil_div(Hv // heads.Hk, HEADS)
        self.shapes = {"factors": (2, CHUNK), "scores": (CHUNK, CHUNK)}
        self.shapes |= dict.fromkeys(("states", "d_states"), (DV, DK))

    def launch(
        self, kernel: Kernel, grid: tuple, threads: int, args: tuple, shared: int, fmas: int
    ) -> None:
        """Launch a kernel. shared: bytes of shared memory. fmas: multiplications with addition per
        token and value head."""
        cost = self.cost(kernel, fmas)
        self.dev.launch(kernel, grid, threads, args, consts=self.consts, smem=shared, cost=cost)

    def prepare(self, scores: Tensor, factors: Tensor, inputs: tuple) -> None:
        """Launch PREPARE. inputs: qkv, gates, skip, starts."""
        Hk, _, DK, _ = self.heads
        grid = (Hk * self.parts, self.B, self.chunks)
        args = (scores, factors, *inputs, *self.sizes, self.carried)
        self.launch(PREPARE, grid, THREADS, args, self.tiles(CHUNK, DK, DK), CHUNK * DK // HEADS)

    def scan(self, kernel: Kernel, args: tuple, products: int) -> None:
        """Launch a scan over chunks. products: matrix products with a state in each chunk."""
        _, Hv, DK, DV = self.heads
        fmas = products * DK * DV + (products - 1) * CHUNK * DV
        shared = CHUNK * (DV + 8) * self.dtype.itemsize  # results of a chunk
        in_f32 = DK * DV * F32.itemsize  # the state
        tiles = STAGES * self.tiles(CHUNK, max(DK, CHUNK))
        shared += in_f32 if self.dtype is F32 else tiles
        self.launch(kernel, (1, Hv, self.B), 2 * DV, (*args, *self.sizes), shared, fmas)

    def gradients(self, d_qkv: Tensor, args: tuple) -> None:
        """Launch GRADIENTS, and SUM over its parts. args: arguments of GRADIENTS after d_keys."""
        Hk, _, DK, DV = self.heads
        shared = self.tiles(CHUNK, DK, DK, DV, DV) + self.tiles(DV, DK, DK)
        shared = max(shared, self.tiles(CHUNK, DK, DK, CHUNK))
        shared += CHUNK * (CHUNK + 8) * F32.itemsize if self.dtype is F32 else 0
        fmas, grid = 2 * DK * DV + CHUNK * DV, (Hk * self.parts, self.B, self.chunks)
        rows, keys = self.B * self.T, 2 * Hk * DK
        shape = (self.parts, self.B, self.T, keys)
        with self.dev.scratch("ssd d_keys", shape, self.dtype) as d_keys:
            args = (d_keys, *args, *self.sizes, self.carried)
            self.launch(GRADIENTS, grid, THREADS, args, shared, fmas)
            args = (d_qkv, d_keys, rows, self.parts, keys, self.heads.channels)
            blocks = ceil_div(rows * keys * self.dtype.itemsize, VECTOR_BYTES * THREADS)
            consts, cost = self.consts, BESIDE_ATTENTION
            self.dev.launch(SUM, blocks, THREADS, args, consts=consts, cost=cost)


def forward(
    dev: Device,
    out: Tensor,
    qkv: Tensor,
    gates: Tensor,
    skip: Tensor,
    heads: Heads,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> None:
    """out[t] = S^T q[t] + skip * v[t]. Every token changes the state S (DK, DV) of each value head.

        S = S * exp(decay[t])                   0 where a document begins
        S = S + k[t] (beta[t] * v[t])^T

    Value head h has the queries and keys of head h * Hk // Hv, without normalization.

    qkv: all queries, all keys, all values: C, B and x of Mamba-2. gates: decays, at most 0, and
    betas, the sizes of time steps. skip: Mamba-2's D, one number for each value head. starts:
    position where each token's document starts; None: 0. state: S before the first token,
    overwritten with S behind the last token; needs starts None. None: S begins at 0 and is not
    kept.

    Cost:    64 DK / 8 + 64 DV + 2 DK DV FMAs per token and value head, on tensor cores; two
             launches.
    Workspace: 64 elements of T and 2 F32 per token and value head.
    """
    call = _Call("ssd.forward", dev, qkv, heads, starts, state)
    expect("ssd.forward", "out", out, qkv.dtype, (call.B, call.T, heads.Hv * heads.DV))
    with call.scratch("scores", "factors") as (scores, factors):
        call.prepare(scores, factors, (qkv, gates, skip, starts))
        call.scan(SCAN, (out, state, qkv, scores, factors), 2)


def backward(
    dev: Device,
    d_qkv: Tensor,
    d_gates: Tensor,
    d_skip: Accumulator | None,
    d_out: Tensor,
    qkv: Tensor,
    gates: Tensor,
    skip: Tensor,
    heads: Heads,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    d_state: Tensor | None = None,
) -> None:
    """Gradients of forward's inputs. Tensors of chunks are computed again.

    state: S before the first token, overwritten with S behind the last token. d_state: gradient of
    S behind the last token, overwritten with the gradient of S before the first token. Give state
    and d_state both, or none.

    Cost:    64 DK / 8 + 128 DV + 5 DK DV FMAs per token and value head, on tensor cores; five
             launches, and one for d_skip.
    Workspace: 64 + 2 DK DV / 64 elements of T and 2 F32 per token and value head, one F32 per chunk
             and value head, and 2 DK elements of T per token and eight value heads of a key head.
    """
    op = "ssd.backward"
    call = _Call(op, dev, qkv, heads, starts, state)
    if (state is None) != (d_state is None):
        raise ValueError(f"{op}: state and d_state are given together, or none of them")
    with (
        call.scratch("scores", "factors", "states", "d_states") as made,
        dev.scratch("ssd skip", (call.B, call.chunks, heads.Hv), F32) as partial,
    ):
        scores, factors, states, d_states = made
        call.prepare(scores, factors, (qkv, gates, skip, starts))
        call.scan(STATES, (states, state, qkv, factors), 1)
        call.scan(SCAN_BACKWARD, (d_qkv, d_states, d_state, d_out, qkv, scores, factors), 2)
        call.gradients(d_qkv, (d_gates, partial, d_out, states, d_states, qkv, gates, starts))
        finish_column_sum(dev, d_skip, partial.view(call.B * call.chunks, heads.Hv))


def recurrence(
    dev: Device,
    out: Tensor,
    state: Tensor,
    qkv: Tensor,
    gates: Tensor,
    skip: Tensor,
    heads: Heads,
) -> None:
    """Compute `forward` with a state token by token, for decoding."""
    call = _Call("ssd.recurrence", dev, qkv, heads, None, state)
    args = (out, state, qkv, gates, skip, *call.sizes)
    grid, consts = (ceil_div(heads.DV, 32), heads.Hv, call.B), call.consts
    cost = BESIDE_ATTENTION
    dev.launch(RECURRENCE, grid, RECURRENCE_THREADS, args, consts=consts, cost=cost)
