"""Causal self-attention with grouped key/value heads: launchers of forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
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
from llmq.runtime.cudnn import FORWARD_WORKSPACE_BYTES, divided_workspace_bytes
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

BACKENDS = ("native", "cudnn")
MAX_HEAD_DIM = 512
DELTA_THREADS = 256
DELTA_LANES = 8  # threads that share a row
SUM_THREADS = 256

_SIZES = "i32 seq_len, i32 num_heads, i32 num_kv_heads"
_MASK = "i32[batch,seq_len]? starts, i32 window, f32 scale"
# Shapes of packed query, key and value heads, of query heads, and of statistics of query rows.
_QKV, _OUT = "[batch,seq_len,num_heads + 2*num_kv_heads,Hd]", "[batch,seq_len,num_heads,Hd]"
_ROWS = "f32[batch,num_heads,seq_len]"
_RULES = {"where": "num_kv_heads >= 1, num_heads % num_kv_heads", "gpu": f"Hd <= {MAX_HEAD_DIM}"}
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


def _backends(
    op: str, qkv: Tensor, backend: str | tuple[str, ...], softcap: int
) -> tuple[str, ...]:
    """Names of the allowed backends. ValueError for an unknown name, or for cuDNN with a softcap;
    TypeError for cuDNN with a dtype other than BF16."""
    backends = (backend,) if isinstance(backend, str) else backend
    for name in backends:
        if name not in BACKENDS:
            raise ValueError(f"{op}: backend must be one of {BACKENDS}, got {name!r}")
        if name == "cudnn" and softcap:
            raise ValueError(f"{op}: the cudnn backend has no softcap, got {softcap}")
        if name == "cudnn" and qkv.dtype != BF16:
            raise TypeError(f"{op}: the cudnn backend needs BF16, got {qkv.dtype.label}")
    return backends


def _heads(op: str, name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of x with `shape`, (B,T,Hq,Hd). ValueError unless x has this shape or (B,T,Hq*Hd)."""
    batch, seq_len, num_heads, head_dim = shape
    if x.shape not in (shape, (batch, seq_len, num_heads * head_dim)):
        raise ValueError(f"{op}: {name} must have shape {shape}, got {x.shape}")
    return x.view(*shape)


def _scale(op: str, scale: float | None, head_dim: int) -> float:
    """The factor of scores. scale: None stands for 1 / sqrt(Hd). ValueError for a wrong factor."""
    scale = head_dim**-0.5 if scale is None else scale
    if not 0 < scale < inf:
        raise ValueError(f"{op}: scale must be positive, got {scale}")
    return scale


def _choose(
    op: str,
    dev: Device,
    backends: tuple[str, ...],
    launches: dict[str, Callable[[], None]],
    qkv: Tensor,
    num_heads: int,
    mask: AttentionMask,
) -> None:
    """Launch the only backend, or the backend that Device.choose takes for these sizes. Chunks are
    not part of the key of the choice, because they change no bit of the results."""
    if len(backends) == 1:
        launches[backends[0]]()
        return
    batch, seq_len, heads, head_dim = qkv.shape
    window = "" if mask.window is None else f" window {mask.window}"
    sizes = f"{num_heads}/{(heads - num_heads) // 2} heads of {head_dim}"
    work = f"{op} {batch}x{seq_len} {sizes} {qkv.dtype.name}{window}"
    dev.choose(work, {name: launches[name] for name in backends})


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
    softcap: int = 0,
    backend: str | tuple[str, ...] = "native",
) -> None:
    """out = softmax(scale * q k^T, causal) v for each head; writes lse for backward.

    qkv: query heads, then key heads, then value heads; query head h uses key/value head h //
    (Hq/Hkv). out: (B,T,Hq,Hd) or (B,T,Hq*Hd). lse: natural logarithm of the softmax's denominator.
    mask: the keys that queries see; `starts` needs "native". scale: factor of scores, rounded to
    F32; None: 1 / sqrt(Hd). softcap: softcap * tanh(score / softcap) replaces each score, only with
    "native"; 0: no cap. backend: "native" is cu/attention/attention.cu; "cudnn" is the library, for
    BF16 only; of several names Device.choose takes one.

    Cost:    2*B*Hq*T*T*Hd FLOPs (half of the square), less with a mask; one launch; cudnn takes a
             workspace.
    """
    op = "attention.forward"
    backends = _backends(op, qkv, backend, softcap)
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
        case = (qkv.dtype, head_dim, mask.masked, dev.spec.small_shared)
        tiles = forward_tiles(*case)
        dev.launch(
            FORWARD,
            (ceil_div(seq_len, tiles.own), num_heads, batch),
            tiles.threads,
            (out, lse, qkv, *sizes),
            consts=compile_consts(*case, softcap),
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
    softcap: int = 0,
    backend: str | tuple[str, ...] = "native",
    deterministic: bool = True,
    kernel: Callable[..., None] | None = None,
) -> None:
    """Gradient of attention; probabilities are computed again from lse.

    d_qkv: every element is written. d_out, out: (B,T,Hq,Hd) or (B,T,Hq*Hd). lse, mask, scale,
    softcap: the same as in forward. chunks: number of pieces of the batch, computed one after
    another in one workspace; at most B*Hq. More than B chunks cut the heads with cudnn. backend:
    see forward, whose backend may be another one. kernel: the result of
    attention_backward.chosen(), which replaces "native". deterministic: False lets cudnn add in any
    order, in a smaller workspace; native sums always have one order.

    Cost:    5*B*Hq*T*T*Hd FLOPs (half of the square, less with a mask; native spends 7, or 8 where
             Hd > 128); native: two launches a chunk, workspace 4*B*Hq*T/chunks bytes, chunks
             beyond B change nothing; cudnn: one or two launches, about 2*B*Hq*T*T/chunks bytes.
    """
    op = "attention.backward"
    backends = _backends(op, qkv, backend, softcap)
    # This call checks the whole batch; launches check chunks.
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
        at_once = _native_batch(lse, qkv, step, parts) if "cudnn" in backends else step
        for part, seen in _batches(tensors, mask, at_once):
            ours = kernel or partial(_backward_native, softcap=softcap)
            ours(dev, part, num_heads, num_kv_heads, seen, scale)

    _choose(op, dev, backends, {"native": native, "cudnn": cudnn}, qkv, num_heads, mask)


def _native_batch(lse: Tensor, qkv: Tensor, step: int, parts: int) -> int:
    """Number of sequences that one native call computes where a cudnn call computes `step`: the
    whole batch if two F32 per row fit into cuDNN's workspace, else `step`."""
    batch, num_heads, seq_len = lse.shape
    num_kv_heads = (qkv.shape[2] - num_heads) // 2
    workspace = divided_workspace_bytes(step, seq_len, num_heads, num_kv_heads, qkv.shape[3], parts)
    return batch if 2 * lse.nbytes + ALIGN <= workspace else step


def _batches(
    tensors: tuple, mask: AttentionMask, step: int
) -> Iterator[tuple[tuple, AttentionMask]]:
    """Tensors and mask of `step` sequences at a time."""
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
    softcap: int,
) -> None:
    """Compute one chunk with our kernels. tensors: d_qkv, d_out, out, lse, qkv."""
    d_qkv, d_out, out, lse, qkv = tensors
    batch, seq_len, _, head_dim = qkv.shape
    small = dev.spec.small_shared or softcap > 0  # larger tiles leave no registers for the cap
    case = (qkv.dtype, head_dim, mask.masked, small)
    tiles, consts = backward_tiles(*case), compile_consts(*case, softcap)
    blocks, key_strips = ceil_div(seq_len, tiles.own), num_kv_heads * (1 + tiles.split_keys)
    starts, window = mask.args(seq_len)
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
            # Blocks of keys, which take longest, come before blocks of queries.
            blocks * batch * (key_strips + num_heads),
            tiles.threads,
            (
                d_qkv,
                d_out,
                lse,
                delta,
                qkv,
                seq_len,
                num_heads,
                num_kv_heads,
                starts,
                window,
                scale,
            ),
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
    """Compute one chunk with cuDNN. tensors: d_qkv, d_out, out, lse, qkv. parts: number of calls
    among which its heads are divided.

    Query heads of different parts may share a key/value head. sum_heads adds the heads' terms in
    the library's order, so that the number of parts changes no bit."""
    d_qkv, *inputs = tensors
    batch, seq_len, _, head_dim = d_qkv.shape
    sizes = (seq_len, num_heads, num_kv_heads)
    nbytes = divided_workspace_bytes(batch, *sizes, head_dim, parts, deterministic)
    with ExitStack() as temps:
        d_kv = None
        if splits_query_heads(num_kv_heads, parts):
            shape = (2, num_heads, seq_len, head_dim)
            d_kv = temps.enter_context(dev.scratch("attention_d_kv", shape, BF16))
        with dev.scratch("cudnn_workspace", (nbytes,), U8) as workspace:
            starts, window = mask.args(seq_len)
            args = (d_qkv, d_kv, *inputs, workspace, int(deterministic), parts)
            flops = 5 * batch * num_heads * mask.pairs(seq_len) * head_dim
            heads = Heads(batch, num_heads, num_kv_heads, parts)
            cost = attention_cost(CUDNN_BACKWARD, BF16, flops, (seq_len, head_dim, window), heads)
            # The library chooses its own grid and block.
            dev.launch(CUDNN_BACKWARD, 1, 1, (*args, *sizes, starts, window, scale), cost=cost)
        if d_kv is not None:
            sum_heads(dev, d_qkv, d_kv)


def sum_heads(dev: Device, d_qkv: Tensor, d_kv: Tensor) -> None:
    """Set key and value heads of d_qkv to the sums of d_kv over their query heads, added in
    ascending order in F32.

    d_kv: (2, Hq, T, Hd), gradients of keys and values by query head. The query heads of d_qkv stay
    as they are.
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
