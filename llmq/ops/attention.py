"""Causal self-attention with grouped key/value heads: training forward and backward, decoding."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.base.dtypes import BF16, F32, I32, U8, DType
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_head_dim, expect_qkv
from llmq.runtime.cudnn import FORWARD_WORKSPACE_BYTES, backward_workspace_bytes
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

BACKENDS = ("native", "cudnn")
HEAD_DIM_MULTIPLE = 16  # one step of the tensor cores' inner dimension
MAX_HEAD_DIM = 256
DELTA_THREADS = 256
DELTA_LANES = 8  # threads that share a row
DECODE_THREADS = 128

_SIZES = "i32 seq_len, i32 num_heads, i32 num_kv_heads"
_SIGHT = "const i32*? starts, i32 window"
FORWARD = Kernel(
    "attention.cu",
    "attention_forward",
    f"T* out, f32* lse, const T* qkv, {_SIZES}, {_SIGHT}",
)
DELTA = Kernel(
    "attention.cu",
    "attention_delta",
    "f32* delta, const T* d_out, const T* out, i32 seq_len, i32 num_heads",
)
BACKWARD = Kernel(
    "attention.cu",
    "attention_backward_tiles",
    f"T* d_qkv, const T* d_out, const f32* lse, const f32* delta, const T* qkv, {_SIZES}, {_SIGHT}",
)
DECODE = Kernel(
    "attention.cu",
    "attention_decode",
    "T* out, inout T* k_cache, inout T* v_cache, const T* qkv, i32 position, i32 num_new, "
    "i32 max_positions, i32 num_heads, i32 num_kv_heads, i32 window",
)
CUDNN_FORWARD = Kernel(
    "attention",
    "attention_forward",
    f"bf16* out, f32* lse, const bf16* qkv, {_SIZES}, {_SIGHT}, u8* workspace",
)
CUDNN_BACKWARD = Kernel(
    "attention",
    "attention_backward",
    "bf16* d_qkv, const bf16* d_out, const bf16* out, const f32* lse, const bf16* qkv, "
    f"u8* workspace, i32 deterministic, {_SIZES}, {_SIGHT}",
)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel cuts its work. A thread block owns `own` rows (queries in the forward, keys or
    queries in the backward) and walks over the other side in steps of `step` rows.

    shared: bytes of dynamic shared memory. stages: how many steps it holds at once. split_keys:
    dK and dV are the work of different blocks.
    """

    own: int
    step: int
    threads: int
    shared: int
    stages: int = 1
    split_keys: bool = False


def forward_tiles(dtype: DType, head_dim: int, masked: bool = False) -> Tiles:
    """Tiles of attention_forward: shared memory holds the queries and one step's keys, values.

    masked: as compile_consts.
    """
    large = head_dim > 128
    if dtype == F32:
        own, step = (32, 16) if large else (64, 32)
        return Tiles(own, step, 256, (own + 2 * step) * (head_dim + 4) * 4 + own * (step + 4) * 4)
    # 32 queries a warp: each key fragment that is read from shared memory is used twice. Larger
    # heads leave registers for fewer scores, and then for fewer queries.
    own = 64 if large or (masked and head_dim > 96) else 128
    step = 64 if head_dim <= (64 if masked else 96) else 32
    return Tiles(own, step, 128, (own + 2 * step) * (head_dim + 8) * 2)


def backward_tiles(dtype: DType, head_dim: int, masked: bool = False) -> Tiles:
    """Tiles of attention_backward_tiles: shared memory holds two tiles of owned rows and two of
    each step, for BF16 with the step's statistics."""
    large = head_dim > 128
    if dtype == F32:
        own, step = (16, 16) if large else (32, 32) if head_dim > 96 else (64, 32)
        rows = 2 * own + 2 * step
        shared = rows * (head_dim + 4) * 4 + own * (step + 4) * 4
        return Tiles(own, step, 256, shared)
    # As registers allow for two sums of own rows, or for one.
    own = 128 if head_dim <= 64 and not masked else 64
    step, stages = (16, 1) if large else (32, 2)
    rows = 2 * own + 2 * stages * step
    shared = rows * (head_dim + 8) * 2 + 2 * stages * step * 4
    return Tiles(own, step, 128, shared, stages, split_keys=large)


def compile_consts(dtype: DType, head_dim: int, masked: bool = False) -> dict[str, int]:
    """The compile-time constants of attention.cu: the same for all its entries.

    masked: queries see less than all that is before them.
    """
    backward = backward_tiles(dtype, head_dim, masked)
    consts = {
        "HEAD_DIM": head_dim,
        "MASKED": int(masked),
        "BACKWARD_STAGES": backward.stages,
        "SPLIT_KEYS": int(backward.split_keys),
    }
    for name, tiles in (
        ("FORWARD", forward_tiles(dtype, head_dim, masked)),
        ("BACKWARD", backward),
    ):
        consts[f"{name}_OWN"] = tiles.own
        consts[f"{name}_STEP"] = tiles.step
        consts[f"{name}_THREADS"] = tiles.threads
    return consts


@dataclass(frozen=True, slots=True)
class Sight:
    """What queries see of the keys up to their own, for all of attention's kernels.

    starts: I32 (B, T), the first position of the document of each, None: all are of one. They
    never fall along a row. window: how many keys, the query's own included; None: all.
    """

    starts: Tensor | None = None
    window: int | None = None

    def within(self, op: str, batch: int, seq_len: int, backend: str) -> Sight:
        """Without a window that every query's keys fit into. TypeError or ValueError if wrong."""
        if self.starts is not None:
            expect(op, "starts", self.starts, I32, (batch, seq_len))
            if backend == "cudnn":
                raise ValueError(f"{op}: the cudnn backend knows no documents within a sequence")
        if self.window is not None and self.window < 1:
            raise ValueError(f"{op}: window must be at least 1, got {self.window}")
        short = self.window is not None and self.window < seq_len
        return Sight(self.starts, self.window if short else None)

    @property
    def masked(self) -> bool:
        """Whether there is more to it than that keys come before their query."""
        return self.starts is not None or self.window is not None

    def args(self, seq_len: int) -> tuple[Tensor | None, int]:
        """For kernels."""
        return self.starts, seq_len if self.window is None else self.window

    def rows(self, start: int, stop: int) -> Sight:
        """Of these sequences of the batch."""
        return Sight(None if self.starts is None else self.starts.rows(start, stop), self.window)

    def pairs(self, seq_len: int) -> int:
        """Twice the pairs of query and key, where a query's own key counts half.

        What documents hide is not known here, and not taken off.
        """
        window = seq_len if self.window is None else self.window
        return window * (2 * seq_len - window)


ALL = Sight()
"""Every query sees all keys up to its own."""


def _check(
    op: str, dev: Device, qkv: Tensor, num_heads: int, num_kv_heads: int, backend: str = "native"
) -> tuple[int, int, int]:
    """B, T, Hd of packed heads (B, T, Hq + 2 Hkv, Hd)."""
    batch, seq_len, head_dim = expect_qkv(op, "qkv", qkv, num_heads, num_kv_heads)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{op}: {num_heads} heads cannot share {num_kv_heads} key/value heads")
    expect_head_dim(op, dev, head_dim, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM)
    if backend not in BACKENDS:
        raise ValueError(f"{op}: backend must be one of {BACKENDS}, got {backend!r}")
    if backend == "cudnn" and qkv.dtype != BF16:
        raise TypeError(f"{op}: the cudnn backend needs BF16, got {qkv.dtype.label}")
    return batch, seq_len, head_dim


def forward(
    dev: Device,
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    sight: Sight = ALL,
    *,
    backend: str = "native",
) -> None:
    """out = softmax(q k^T / sqrt(Hd), causal) v for each head; lse for the backward.

    Args (contiguous; T-type F32 or BF16, all the same; statistics and sums in F32):
        out      out  (B,T,Hq,Hd)          or (B,T,Hq*Hd)
        lse      out  F32 (B,Hq,T)         log of the softmax's denominator, natural logarithm
        qkv      in   (B,T,Hq+2*Hkv,Hd)    query heads, then key heads, then value heads;
                                           query head h uses key/value head h // (Hq/Hkv)
        sight    what queries see; starts with "native" alone
        backend  "native": llmq/cu/attention.cu; "cudnn": the library, BF16 only

    Cost:    2*B*Hq*T*T*Hd FLOPs (half of the square), or less by what is not seen; one launch;
             cudnn takes a workspace.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape, head size or backend.
    """
    op = "attention.forward"
    batch, seq_len, head_dim = _check(op, dev, qkv, num_heads, num_kv_heads, backend)
    expect(op, "out", out, qkv.dtype, _like(out, batch, seq_len, num_heads, head_dim))
    expect(op, "lse", lse, F32, (batch, num_heads, seq_len))
    out = out.view(batch, seq_len, num_heads, head_dim)
    sight = sight.within(op, batch, seq_len, backend)
    sizes = (seq_len, num_heads, num_kv_heads, *sight.args(seq_len))
    flops = 2 * batch * num_heads * sight.pairs(seq_len) * head_dim
    if backend == "cudnn":
        with dev.scratch("cudnn_workspace", (FORWARD_WORKSPACE_BYTES,), U8) as workspace:
            args = (out, lse, qkv, *sizes, workspace)
            dev.launch(CUDNN_FORWARD, 1, 1, args, flops=flops)
        return
    tiles = forward_tiles(qkv.dtype, head_dim, sight.masked)
    dev.launch(
        FORWARD,
        (ceil_div(seq_len, tiles.own), num_heads, batch),
        tiles.threads,
        (out, lse, qkv, *sizes),
        consts=compile_consts(qkv.dtype, head_dim, sight.masked),
        smem=tiles.shared,
        flops=flops,
    )


def _like(x: Tensor, batch: int, seq_len: int, num_heads: int, head_dim: int) -> tuple[int, ...]:
    """The expected shape of x, heads apart or merged as x has them."""
    if len(x.shape) == 3:
        return (batch, seq_len, num_heads * head_dim)
    return (batch, seq_len, num_heads, head_dim)


def backward(
    dev: Device,
    d_qkv: Tensor,
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    chunks: int = 1,
    sight: Sight = ALL,
    *,
    backend: str = "native",
    deterministic: bool = True,
) -> None:
    """Gradient of attention: probabilities are computed again from lse.

    Args (contiguous; T-type F32 or BF16, all the same; sums in F32):
        d_qkv          out  (B,T,Hq+2*Hkv,Hd)   every element is written
        d_out, out     in   (B,T,Hq,Hd)         or (B,T,Hq*Hd)
        lse            in   F32 (B,Hq,T)        of the forward
        qkv            in   (B,T,Hq+2*Hkv,Hd)
        chunks         pieces that the batch is cut into, one after another, to share a workspace
        sight          of the forward
        deterministic  False lets cudnn add in any order, for less workspace; native always is

    Cost:    5*B*Hq*T*T*Hd FLOPs (half of the square, or less by what is not seen; native spends 7,
             or 8 where Hd > 128); native: two launches a chunk, workspace 4*B*Hq*T/chunks bytes.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape, head size or backend.
    """
    op = "attention.backward"
    batch, seq_len, head_dim = _check(op, dev, qkv, num_heads, num_kv_heads, backend)
    expect(op, "d_qkv", d_qkv, qkv.dtype, qkv.shape)
    for name, x in (("d_out", d_out), ("out", out)):
        expect(op, name, x, qkv.dtype, _like(x, batch, seq_len, num_heads, head_dim))
    expect(op, "lse", lse, F32, (batch, num_heads, seq_len))
    if not 1 <= chunks <= batch:
        raise ValueError(f"{op}: chunks must be from 1 to {batch}, the batch, got {chunks}")
    sight = sight.within(op, batch, seq_len, backend)
    heads = (batch, seq_len, num_heads, head_dim)
    tensors = (d_qkv, d_out.view(*heads), out.view(*heads), lse, qkv)
    step = ceil_div(batch, chunks)
    for start in range(0, batch, step):
        stop = min(start + step, batch)
        part, seen = tuple(x.rows(start, stop) for x in tensors), sight.rows(start, stop)
        if backend == "cudnn":
            _backward_cudnn(dev, part, num_heads, num_kv_heads, seen, deterministic)
        else:
            _backward_native(dev, part, num_heads, num_kv_heads, seen)


def _backward_native(
    dev: Device, tensors: tuple, num_heads: int, num_kv_heads: int, sight: Sight
) -> None:
    """One chunk with our kernels; tensors: d_qkv, d_out, out, lse, qkv."""
    d_qkv, d_out, out, lse, qkv = tensors
    batch, seq_len, _, head_dim = qkv.shape
    tiles = backward_tiles(qkv.dtype, head_dim, sight.masked)
    consts = compile_consts(qkv.dtype, head_dim, sight.masked)
    blocks, key_strips = ceil_div(seq_len, tiles.own), num_kv_heads * (1 + tiles.split_keys)
    sizes = (seq_len, num_heads, num_kv_heads, *sight.args(seq_len))
    with dev.scratch("attention_delta", lse.shape, F32) as delta:
        dev.launch(
            DELTA,
            (ceil_div(seq_len * num_heads * DELTA_LANES, DELTA_THREADS), batch),
            DELTA_THREADS,
            (delta, d_out, out, seq_len, num_heads),
            consts=consts,
        )
        dev.launch(
            BACKWARD,
            # First the blocks that own keys, which are the long ones, then those of queries.
            blocks * batch * (key_strips + num_heads),
            tiles.threads,
            (d_qkv, d_out, lse, delta, qkv, *sizes),
            consts=consts,
            smem=tiles.shared,
            flops=(7 + tiles.split_keys) * batch * num_heads * sight.pairs(seq_len) * head_dim,
        )


def _backward_cudnn(
    dev: Device,
    tensors: tuple,
    num_heads: int,
    num_kv_heads: int,
    sight: Sight,
    deterministic: bool,
) -> None:
    """One chunk with cuDNN; tensors: d_qkv, d_out, out, lse, qkv."""
    batch, seq_len, _, head_dim = tensors[-1].shape
    sizes = (seq_len, num_heads, num_kv_heads)
    nbytes = backward_workspace_bytes(batch, *sizes, head_dim, deterministic)
    with dev.scratch("cudnn_workspace", (nbytes,), U8) as workspace:
        dev.launch(
            CUDNN_BACKWARD,
            1,  # the library chooses its own grid and block
            1,
            (*tensors, workspace, int(deterministic), *sizes, *sight.args(seq_len)),
            flops=5 * batch * num_heads * sight.pairs(seq_len) * head_dim,
        )


def decode(
    dev: Device,
    out: Tensor,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None = None,
) -> None:
    """Store the keys and values of n new positions, and attend causally to those so far.

    Args (contiguous; F32 or BF16, all the same):
        out               out    (B,n,Hq,Hd)          or (B,n,Hq*Hd)
        qkv               in     (B,n,Hq+2*Hkv,Hd)    rotated already
        k_cache, v_cache  inout  (B,P,Hkv,Hd)         rows [position, position + n) are written,
                                                      earlier ones read, later ones untouched
        position          number of positions that the cache holds; position + n <= P
        window            positions that each sees, its own included; None: all so far

    Cost:    reads the used part of the cache once per query head; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape or position.
    """
    op = "attention.decode"
    batch, num_new, head_dim = _check(op, dev, qkv, num_heads, num_kv_heads)
    expect(op, "out", out, qkv.dtype, _like(out, batch, num_new, num_heads, head_dim))
    max_positions = k_cache.shape[1]
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        expect(op, name, cache, qkv.dtype, (batch, max_positions, num_kv_heads, head_dim))
    if not 0 <= position <= max_positions - num_new:
        raise ValueError(
            f"{op}: position must be from 0 to {max_positions - num_new}, for {num_new} new "
            f"positions in a cache of {max_positions}, got {position}"
        )
    out = out.view(batch, num_new, num_heads, head_dim)
    seen = max_positions if window is None else min(window, max_positions)
    sizes = (position, num_new, max_positions, num_heads, num_kv_heads, seen)
    dev.launch(
        DECODE,
        (num_heads, num_new, batch),
        DECODE_THREADS,
        (out, k_cache, v_cache, qkv, *sizes),
        consts=compile_consts(qkv.dtype, head_dim),
        flops=4 * batch * num_heads * num_new * min(position + num_new, seen) * head_dim,
    )
