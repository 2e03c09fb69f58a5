"""Attention whose output is gated: by channels beside each query head, or by sinks."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    VECTOR_BYTES,
    expect_accumulator,
    expect_float,
    expect_multiple,
    finish_column_sum,
)
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

SIZES = "i64 rows, i32 heads, i32 kv_heads"
SPLIT = Kernel(
    "attention/attention_gate.cu",
    "attention_gate_split",
    args=f"T* qkv, T* gate, const T* product, {SIZES}",
)
MERGE = Kernel(
    "attention/attention_gate.cu",
    "attention_gate_merge",
    args=f"T* product, const T* qkv, const T* gate, {SIZES}",
)
FORWARD = Kernel(
    "attention/attention_gate.cu",
    "attention_gate_forward",
    args="T* out, const T* x, const T* gate, i64 n",
)
BACKWARD = Kernel(
    "attention/attention_gate.cu",
    "attention_gate_backward",
    args="T* d_x, T* d_gate, const T* d_out, const T* x, const T* gate, i64 n",
)

THREADS, MULTIPLE = 256, 8  # threads of a block; channels of a head


def _launch(dev: Device, kernel: Kernel, size: int, args: tuple, head_dim: int) -> None:
    """size: elements, a vector of them in each thread."""
    blocks = ceil_div(size * args[0].dtype.itemsize, VECTOR_BYTES * THREADS)
    consts, cost = {"HEAD_DIM": head_dim}, BESIDE_ATTENTION
    dev.launch(kernel, blocks, THREADS, args, consts=consts, cost=cost)


def _sizes(
    op: str, dev: Device, product: Tensor, qkv: Tensor, gate: Tensor, heads: int, kv_heads: int
) -> tuple[int, int]:
    """rows and Hd of tensors that fit."""
    expect_float(op, "product", product)
    rows, columns = product.shape if len(product.shape) == 2 else (0, 0)
    head_dim = columns // (2 * (heads + kv_heads))
    expect_multiple(op, dev, "Hd", head_dim, MULTIPLE)
    expect(op, "product", product, None, (rows, 2 * (heads + kv_heads) * head_dim))
    expect(op, "qkv", qkv, product.dtype, (rows, (heads + 2 * kv_heads) * head_dim))
    expect(op, "gate", gate, product.dtype, (rows, heads * head_dim))
    return rows, head_dim


def split(
    dev: Device, qkv: Tensor, gate: Tensor, product: Tensor, heads: int, kv_heads: int
) -> None:
    """The heads of a product, each query head followed by its gate, as attention takes them.

    Args:
        qkv      out  T  (rows,(Hq+2Hkv)*Hd)    F32 or BF16; query, key, value heads
        gate     out  T  (rows,Hq*Hd)
        product  in   T  (rows,(2Hq+2Hkv)*Hd)   q0 g0 q1 g1 ..., key, value heads; Hd % 8 == 0
    """
    rows, head_dim = _sizes("attention_gate.split", dev, product, qkv, gate, heads, kv_heads)
    args = (qkv, gate, product, rows, heads, kv_heads)
    _launch(dev, SPLIT, product.size, args, head_dim)


def merge(
    dev: Device, product: Tensor, qkv: Tensor, gate: Tensor, heads: int, kv_heads: int
) -> None:
    """The product whose split gives these: of gradients. Args, cost and errors as split's."""
    rows, head_dim = _sizes("attention_gate.merge", dev, product, qkv, gate, heads, kv_heads)
    args = (product, qkv, gate, rows, heads, kv_heads)
    _launch(dev, MERGE, product.size, args, head_dim)


def _expect_all(op: str, dev: Device, **tensors: Tensor) -> Tensor:
    """The first of tensors that are alike."""
    first, *_ = tensors.values()
    expect_float(op, next(iter(tensors)), first)
    for name, tensor in tensors.items():
        expect(op, name, tensor, first.dtype, first.shape)
    expect_multiple(op, dev, "elements", first.size, MULTIPLE)
    return first


def forward(dev: Device, out: Tensor, x: Tensor, gate: Tensor) -> None:
    """out = x * sigmoid(gate).

    Args:
        out   out  T  any shape    F32 or BF16; a multiple of 8 elements
        x     in   T  the same
        gate  in   T  the same
    """
    n = _expect_all("attention_gate.forward", dev, out=out, x=x, gate=gate).size
    _launch(dev, FORWARD, n, (out, x, gate, n), MULTIPLE)


def backward(
    dev: Device, d_x: Tensor, d_gate: Tensor, d_out: Tensor, x: Tensor, gate: Tensor
) -> None:
    """d_x = d_out * s, d_gate = d_out * x * s * (1 - s), with s = sigmoid(gate). Args as forward's,
    and d_x, d_gate out, d_out in, all alike; d_x may be d_out."""
    given = {"d_x": d_x, "d_gate": d_gate, "d_out": d_out, "x": x, "gate": gate}
    n = _expect_all("attention_gate.backward", dev, **given).size
    _launch(dev, BACKWARD, n, (*given.values(), n), MULTIPLE)


# -- Attention's sinks: each query head has a score that gives attention to nothing
#
# They follow any attention, as if the softmax had one more score, of a value of zeros. Attention's
# backward needs nothing else: d_sink = - sum of exp(sink - lse) * delta, delta = d_out . out.

ROWS = 64  # of a split, at least

_SINKS_SIZES = "i32 batch, i32 seq_len, i32 heads"
SINKS_FORWARD = Kernel(
    "attention/attention_gate.cu",
    "attention_sinks_forward",
    args=f"inout T* out, f32* lse, const f32* without, const T* sinks, {_SINKS_SIZES}",
)
SINKS_BACKWARD = Kernel(
    "attention/attention_gate.cu",
    "attention_sinks_backward",
    args="f32* partial, const T* d_out, const T* out, const f32* lse, const T* sinks, "
    f"{_SINKS_SIZES}, i32 splits",
)


def sinks_forward(dev: Device, out: Tensor, lse: Tensor, without: Tensor, sinks: Tensor) -> None:
    """out *= sigmoid(without - sink) of each head, lse = log(exp(without) + exp(sink)).

    Args (T is BF16 or F32):
        out      inout  T   (B,T,Hq,Hd)   Hd a multiple of 16 bytes
        lse      out    F32 (B,Hq,T)
        without  in     F32 (B,Hq,T)      attention's own lse; other memory than lse
        sinks    in     T   (Hq,)
    """
    sizes = _sinks_sizes("attention_sinks.forward", dev, out, sinks, lse=lse, without=without)
    vectors = ceil_div(out.nbytes, VECTOR_BYTES)
    args = (out, lse, without, sinks, *sizes)
    consts = {"HEAD_DIM": out.shape[3]}
    blocks = ceil_div(vectors, THREADS)
    dev.launch(SINKS_FORWARD, blocks, THREADS, args, consts=consts, cost=BESIDE_ATTENTION)


def sinks_backward(
    dev: Device, d_sinks: Accumulator, d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor
) -> None:
    """d_sinks = or += - sum over rows of exp(sink - lse) * (d_out . out), in a fixed order.

    Args (T is BF16 or F32, G is BF16 or F32):
        d_sinks     inout  Accumulator G (Hq,)
        d_out, out  in     T   (B,T,Hq,Hd)
        lse         in     F32 (B,Hq,T)        of sinks_forward, as out is
        sinks       in     T   (Hq,)

    Cost:    d_out and out read once; two launches.
    """
    op = "attention_sinks.backward"
    sizes = _sinks_sizes(op, dev, out, sinks, lse=lse)
    expect(op, "d_out", d_out, out.dtype, out.shape)
    expect_accumulator(op, "d_sinks", d_sinks, sinks.shape)
    batch, seq_len, heads = sizes
    vectors = max(out.shape[3] * out.dtype.itemsize // VECTOR_BYTES, 1)
    tiles = ceil_div(heads, max(THREADS // vectors, 1))
    rows = batch * seq_len
    splits = max(1, min(2 * dev.num_sms // tiles, rows // ROWS))
    splits = ceil_div(rows, ceil_div(rows, splits))  # no split is empty
    with dev.scratch("sinks' partial sums", (splits, heads), F32) as partial:
        dev.launch(
            SINKS_BACKWARD,
            (tiles, splits),
            THREADS,
            (partial, d_out, out, lse, sinks, *sizes, splits),
            consts={"HEAD_DIM": out.shape[3]},
            cost=BESIDE_ATTENTION,
        )
        finish_column_sum(dev, d_sinks, partial)


def _sinks_sizes(
    op: str, dev: Device, out: Tensor, sinks: Tensor, **statistics: Tensor
) -> tuple[int, int, int]:
    """B, T and Hq of tensors that fit."""
    expect_float(op, "out", out)
    if len(out.shape) != 4:
        raise ValueError(f"{op}: out must be (B, T, Hq, Hd), got {out.shape}")
    expect_multiple(op, dev, "Hd", out.shape[3], VECTOR_BYTES // out.dtype.itemsize)
    batch, seq_len, heads, _ = out.shape
    for name, tensor in statistics.items():
        expect(op, name, tensor, F32, (batch, heads, seq_len))
    expect(op, "sinks", sinks, out.dtype, (heads,))
    return batch, seq_len, heads
