"""Causal self-attention with grouped key/value heads, forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import inf

from llmq.base.dtypes import BF16, F32, U8
from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES
from llmq.runtime.arena import ALIGN
from llmq.runtime.attention_parts import (
    ALL,
    AttentionMask,
    backward_tiles,
    compile_consts,
    forward_tiles,
    split,
    splits_query_heads,
)
from llmq.runtime.cost import BESIDE_ATTENTION, Heads, attention_cost
from llmq.runtime.cudnn import (
    FORWARD_WORKSPACE_BYTES,
    divided_workspace_bytes,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

BACKENDS = ("native", "cudnn")
MAX_HEAD_DIM = 256
DELTA_THREADS = 256
DELTA_LANES = 8  # threads that share a row
SUM_THREADS = 256

_SIZES = "i32 seq_len, i32 num_heads, i32 num_kv_heads"
_MASK = "i32[batch,seq_len]? starts, i32 window, f32 scale"
# Shapes of packed heads, of query heads, and of statistics of their rows.
_QKV, _OUT = "[batch,seq_len,num_heads + 2*num_kv_heads,Hd]", "[batch,seq_len,num_heads,Hd]"
_ROWS = "f32[batch,num_heads,seq_len]"
_RULES = {
    "where": "num_kv_heads >= 1, num_heads % num_kv_heads",
    "gpu": f"Hd <= {MAX_HEAD_DIM}",
}
FORWARD = Kernel(
    "attention/attention.cu",
    "attention_forward",
    f"out T{_OUT} out, out {_ROWS} lse, T{_QKV} qkv, {_SIZES}, {_MASK}",
    **_RULES,
)
DELTA = Kernel(
    "attention/attention.cu",
    "attention_delta",
    f"out {_ROWS} delta, T{_OUT} d_out, T{_OUT} out, i32 seq_len, i32 num_heads",
)
BACKWARD = Kernel(
    "attention/attention.cu",
    "attention_backward_tiles",
    f"out T{_QKV} d_qkv, T{_OUT} d_out, {_ROWS} lse, {_ROWS} delta, T{_QKV} qkv, {_SIZES}, {_MASK}",
    **_RULES,
)
SUM_HEADS = Kernel(
    "attention/attention.cu",
    "attention_sum_heads",
    "inout T[1,seq_len,num_heads + 2*num_kv_heads,Hd] d_qkv, T[2,num_heads,seq_len,Hd] d_kv, "
    + _SIZES,
    **_RULES,
)
CUDNN_FORWARD = Kernel(
    "attention/attention",
    "attention_forward",
    f"out bf16{_OUT} out, out {_ROWS} lse, bf16{_QKV} qkv, {_SIZES}, {_MASK}, "
    "out u8[bytes] workspace",
    **_RULES,
)
CUDNN_BACKWARD = Kernel(
    "attention/attention",
    "attention_backward",
    f"out bf16{_QKV} d_qkv, out bf16[2,num_heads,seq_len,Hd]? d_kv, bf16{_OUT} d_out, "
    f"bf16{_OUT} out, {_ROWS} lse, bf16{_QKV} qkv, out u8[bytes] workspace, i32 deterministic, "
    f"i32 parts, {_SIZES}, {_MASK}",
    **_RULES,
)


def _expect_backends(op: str, qkv: Tensor, backends: tuple[str, ...]) -> None:
    for backend in backends:
        if backend not in BACKENDS:
            raise ValueError(f"{op}: backend must be one of {BACKENDS}, got {backend!r}")
        if backend == "cudnn" and qkv.dtype != BF16:
            raise TypeError(f"{op}: the cudnn backend needs BF16, got {qkv.dtype.label}")


def _heads(op: str, name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x in the shape (B,T,Hq,Hd). Raises ValueError unless x has that, or heads as one
    dimension."""
    batch, seq_len, num_heads, head_dim = shape
    if x.shape not in (shape, (batch, seq_len, num_heads * head_dim)):
        raise ValueError(f"{op}: {name} must have shape {shape}, got {x.shape}")
    return x.view(*shape)


def _scale(op: str, scale: float | None, head_dim: int) -> float:
    """The factor of scores; None: 1 / sqrt(Hd)."""
    scale = head_dim**-0.5 if scale is None else scale
    if not 0 < scale < inf:
        raise ValueError(f"{op}: scale must be positive, got {scale}")
    return scale


def _names(backend: str | tuple[str, ...]) -> tuple[str, ...]:
    return (backend,) if isinstance(backend, str) else backend


def _choose(
    op: str,
    dev: Device,
    backends: tuple[str, ...],
    ways: dict[str, Callable[[], None]],
    qkv: Tensor,
    num_heads: int,
    mask: AttentionMask,
) -> None:
    """One of these backends' ways. Chunks tell no choice from another, as they change no bit."""
    if len(backends) == 1:
        ways[backends[0]]()
        return
    batch, seq_len, heads, head_dim = qkv.shape
    window = "" if mask.window is None else f" window {mask.window}"
    sizes = f"{num_heads}/{(heads - num_heads) // 2} heads of {head_dim}"
    work = f"{op} {batch}x{seq_len} {sizes} {qkv.dtype.name}{window}"
    dev.choose(work, {name: ways[name] for name in backends})


def forward(
    dev: Device,
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    mask: AttentionMask = ALL,
    *,
    scale: float | None = None,
    backend: str | tuple[str, ...] = "native",
) -> None:
    """out = softmax(scale * q k^T, causal) v for each head; lse for the backward.

    qkv: query heads, then key heads, then value heads; query head h uses key/value head h //
    (Hq/Hkv). out: (B,T,Hq,Hd) or (B,T,Hq*Hd). lse: log of the softmax's denominator, natural
    logarithm. mask: the keys that queries see; starts with "native" alone. scale: factor of scores,
    rounded to F32; None: 1 / sqrt(Hd). backend: "native", cu/attention/attention.cu; "cudnn", the
    library, BF16 only; several: as Device.choose takes ways.

    Cost:    2*B*Hq*T*T*Hd FLOPs (half of the square), or less by what is not seen; one launch;
             cudnn takes a workspace.
    """
    op, backends = "attention.forward", _names(backend)
    _expect_backends(op, qkv, backends)
    batch, seq_len, head_dim = FORWARD.dims(qkv=qkv, num_heads=num_heads, num_kv_heads=num_kv_heads)
    out = _heads(op, "out", out, (batch, seq_len, num_heads, head_dim))
    mask = mask.within(op, seq_len, backends)
    starts, window = mask.args(seq_len)
    sizes = (seq_len, num_heads, num_kv_heads, starts, window, _scale(op, scale, head_dim))
    flops = 2 * batch * num_heads * mask.pairs(seq_len) * head_dim
    seen = (seq_len, head_dim, window)

    def cudnn() -> None:
        with dev.scratch("cudnn_workspace", (FORWARD_WORKSPACE_BYTES,), U8) as workspace:
            args = (out, lse, qkv, *sizes, workspace)
            cost = attention_cost(CUDNN_FORWARD, BF16, flops, seen)
            dev.launch(CUDNN_FORWARD, 1, 1, args, cost=cost)

    def native() -> None:
        tiles = forward_tiles(qkv.dtype, head_dim, mask.masked)
        dev.launch(
            FORWARD,
            (ceil_div(seq_len, tiles.own), num_heads, batch),
            tiles.threads,
            (out, lse, qkv, *sizes),
            consts=compile_consts(qkv.dtype, head_dim, mask.masked, dev.spec.small_shared),
            smem=tiles.shared,
            cost=attention_cost(FORWARD, qkv.dtype, flops, seen),
        )

    _choose(op, dev, backends, {"native": native, "cudnn": cudnn}, qkv, num_heads, mask)


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
    mask: AttentionMask = ALL,
    *,
    scale: float | None = None,
    backend: str | tuple[str, ...] = "native",
    deterministic: bool = True,
    kernel: Callable[..., None] | None = None,
) -> None:
    """Gradient of attention: probabilities are computed again from lse.

    d_qkv: every element is written. d_out, out: (B,T,Hq,Hd) or (B,T,Hq*Hd). lse, mask, scale: of
    the forward. chunks: pieces that the batch is cut into, one after another, to share a workspace;
    with cudnn up to B*Hq, of which those beyond B cut the heads. backend: of the forward or another
    one, as there. kernel: what "native" means here, of ops.attention.attention_backward.chosen().
    deterministic: False lets cudnn add in any order, for less workspace; native always is.

    Cost:    5*B*Hq*T*T*Hd FLOPs (half of the square, or less by what is not seen; native spends 7,
             or 8 where Hd > 128); native: two launches a chunk, workspace 4*B*Hq*T/chunks bytes,
             chunks beyond B do nothing; cudnn: one or two, about 2*B*Hq*T*T/chunks.
    """
    op, backends = "attention.backward", _names(backend)
    _expect_backends(op, qkv, backends)
    # All sequences, as launches check the parts that they are cut into.
    batch, seq_len, head_dim = BACKWARD.dims(
        qkv=qkv, lse=lse, d_qkv=d_qkv, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    if not 1 <= chunks <= (most := batch * num_heads):
        raise ValueError(
            f"{op}: chunks must be from 1 to {most}, the heads of all sequences, got {chunks}"
        )
    mask, scale = mask.within(op, seq_len, backends), _scale(op, scale, head_dim)
    shape = (batch, seq_len, num_heads, head_dim)
    d_out, out = _heads(op, "d_out", d_out, shape), _heads(op, "out", out, shape)
    tensors = (d_qkv, d_out, out, lse, qkv)
    step, parts = split(batch, chunks)

    def cudnn() -> None:
        for part, seen in _batches(tensors, mask, step):
            _backward_cudnn(dev, part, num_heads, num_kv_heads, parts, seen, scale, deterministic)

    def native() -> None:
        at_once = _fitting(lse, qkv, step, parts) if "cudnn" in backends else step
        for part, seen in _batches(tensors, mask, at_once):
            (kernel or _backward_native)(dev, part, num_heads, num_kv_heads, seen, scale)

    _choose(op, dev, backends, {"native": native, "cudnn": cudnn}, qkv, num_heads, mask)


def _fitting(lse: Tensor, qkv: Tensor, step: int, parts: int) -> int:
    """Sequences that native takes at a time beside cudnn, which takes `step`: all of them, if their
    sums of rows (of `own` two for each) fit into its workspace, as nearly always."""
    batch, num_heads, seq_len = lse.shape
    heads = (num_heads, (qkv.shape[2] - num_heads) // 2)
    there = divided_workspace_bytes(step, seq_len, *heads, qkv.shape[3], parts)
    return batch if 2 * lse.nbytes + ALIGN <= there else step


def _batches(
    tensors: tuple, mask: AttentionMask, step: int
) -> Iterator[tuple[tuple, AttentionMask]]:
    """So many sequences of these tensors at a time, and what is seen of them."""
    batch = tensors[0].shape[0]
    for start in range(0, batch, step):
        stop = min(start + step, batch)
        yield tuple(x.rows(start, stop) for x in tensors), mask.rows(start, stop)


def _backward_native(
    dev: Device,
    tensors: tuple,
    num_heads: int,
    num_kv_heads: int,
    mask: AttentionMask,
    scale: float,
) -> None:
    """One chunk with our kernels; tensors: d_qkv, d_out, out, lse, qkv."""
    d_qkv, d_out, out, lse, qkv = tensors
    batch, seq_len, _, head_dim = qkv.shape
    kind = (qkv.dtype, head_dim, mask.masked, dev.spec.small_shared)
    tiles, consts = backward_tiles(*kind), compile_consts(*kind)
    blocks, key_strips = ceil_div(seq_len, tiles.own), num_kv_heads * (1 + tiles.split_keys)
    starts, window = mask.args(seq_len)
    sizes = (seq_len, num_heads, num_kv_heads, starts, window, scale)
    flops = (7 + tiles.split_keys) * batch * num_heads * mask.pairs(seq_len) * head_dim
    with dev.scratch("attention_delta", lse.shape, F32) as delta:
        dev.launch(
            DELTA,
            (ceil_div(seq_len * num_heads * DELTA_LANES, DELTA_THREADS), batch),
            DELTA_THREADS,
            (delta, d_out, out, seq_len, num_heads),
            consts=consts,
            cost=BESIDE_ATTENTION,
        )
        dev.launch(
            BACKWARD,
            # First the blocks that own keys, which are the long ones, then those of queries.
            blocks * batch * (key_strips + num_heads),
            tiles.threads,
            (d_qkv, d_out, lse, delta, qkv, *sizes),
            consts=consts,
            smem=tiles.shared,
            cost=attention_cost(BACKWARD, qkv.dtype, flops, (seq_len, head_dim, window)),
        )


def _backward_cudnn(
    dev: Device,
    tensors: tuple,
    num_heads: int,
    num_kv_heads: int,
    parts: int,
    mask: AttentionMask,
    scale: float,
    deterministic: bool,
) -> None:
    """Some sequences with cuDNN, their heads in parts; tensors: d_qkv, d_out, out, lse, qkv. The
    parts that query heads add to the gradients of one key/value head are summed in the order in
    which the library does it where it has all of them, so that parts change no bit."""
    d_qkv, *inputs = tensors
    batch, seq_len, _, head_dim = d_qkv.shape
    sizes, (starts, window) = (seq_len, num_heads, num_kv_heads), mask.args(seq_len)
    nbytes = divided_workspace_bytes(batch, *sizes, head_dim, parts, deterministic)
    with ExitStack() as temps:
        d_kv = None
        if splits_query_heads(num_kv_heads, parts):
            shape = (2, num_heads, seq_len, head_dim)
            d_kv = temps.enter_context(dev.scratch("attention_d_kv", shape, BF16))
        with dev.scratch("cudnn_workspace", (nbytes,), U8) as workspace:
            how = (workspace, int(deterministic), parts, *sizes, starts, window, scale)
            flops = 5 * batch * num_heads * mask.pairs(seq_len) * head_dim
            heads = Heads(batch, num_heads, num_kv_heads, parts)
            cost = attention_cost(CUDNN_BACKWARD, BF16, flops, (seq_len, head_dim, window), heads)
            # The library chooses its own grid and block.
            dev.launch(CUDNN_BACKWARD, 1, 1, (d_qkv, d_kv, *inputs, *how), cost=cost)
        if d_kv is not None:
            sum_heads(dev, d_qkv, d_kv)


def sum_heads(dev: Device, d_qkv: Tensor, d_kv: Tensor) -> None:
    """d_qkv's key and value heads = sums over their query heads, in ascending order, in F32.

    Its query heads are left as they are. d_kv: of each query head, for keys and for values.
    """
    num_heads, seq_len, head_dim = SUM_HEADS.dims(d_kv=d_kv)
    num_kv_heads = (d_qkv.shape[2] - num_heads) // 2
    vectors = 2 * num_kv_heads * seq_len * head_dim * d_kv.dtype.itemsize // VECTOR_BYTES
    dev.launch(
        SUM_HEADS,
        ceil_div(vectors, SUM_THREADS),
        SUM_THREADS,
        (d_qkv, d_kv, seq_len, num_heads, num_kv_heads),
        consts=compile_consts(d_qkv.dtype, head_dim),
        cost=BESIDE_ATTENTION,
    )
