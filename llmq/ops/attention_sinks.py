"""Attention's sinks: each query head has a score that gives attention to nothing.

They follow any attention, whose result and statistics they change as if the softmax had one more
score, of a value of zeros. Attention's backward reads both and needs nothing else:

    P = exp(S - lse), delta = d_out . out       d_sink = - sum of exp(sink - lse) * delta
"""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import VECTOR_BYTES, expect_accumulator, expect_float, finish_column_sum
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
ROWS = 64  # of a split, at least

_SIZES = "i32 batch, i32 seq_len, i32 heads"
FORWARD = Kernel(
    "attention_sinks.cu",
    "attention_sinks_forward",
    args=f"inout T* out, f32* lse, const f32* without, const T* sinks, {_SIZES}",
)
BACKWARD = Kernel(
    "attention_sinks.cu",
    "attention_sinks_backward",
    args="f32* partial, const T* d_out, const T* out, const f32* lse, const T* sinks, "
    f"{_SIZES}, i32 splits",
)


def forward(dev: Device, out: Tensor, lse: Tensor, without: Tensor, sinks: Tensor) -> None:
    """out *= sigmoid(without - sink) of each head, lse = log(exp(without) + exp(sink)).

    Args (T is BF16 or F32):
        out      inout  T   (B,T,Hq,Hd)   Hd a multiple of 16 bytes
        lse      out    F32 (B,Hq,T)
        without  in     F32 (B,Hq,T)      attention's own lse; other memory than lse
        sinks    in     T   (Hq,)
    """
    sizes = _sizes("attention_sinks.forward", out, sinks, lse=lse, without=without)
    vectors = ceil_div(out.nbytes, VECTOR_BYTES)
    args = (out, lse, without, sinks, *sizes)
    consts = {"HEAD_DIM": out.shape[3]}
    blocks = ceil_div(vectors, THREADS)
    dev.launch(FORWARD, blocks, THREADS, args, consts=consts, cost=BESIDE_ATTENTION)


def backward(
    dev: Device, d_sinks: Accumulator, d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor
) -> None:
    """d_sinks = or += - sum over rows of exp(sink - lse) * (d_out . out), in a fixed order.

    Args (T is BF16 or F32, G is BF16 or F32):
        d_sinks     inout  Accumulator G (Hq,)
        d_out, out  in     T   (B,T,Hq,Hd)
        lse         in     F32 (B,Hq,T)        of forward, as out is
        sinks       in     T   (Hq,)

    Cost:    d_out and out read once; two launches.
    """
    op = "attention_sinks.backward"
    sizes = _sizes(op, out, sinks, lse=lse)
    expect(op, "d_out", d_out, out.dtype, out.shape)
    expect_accumulator(op, "d_sinks", d_sinks, sinks.shape)
    batch, seq_len, heads = sizes
    vectors = out.shape[3] * out.dtype.itemsize // VECTOR_BYTES
    tiles = ceil_div(heads, max(THREADS // vectors, 1))
    rows = batch * seq_len
    splits = max(1, min(2 * dev.num_sms // tiles, rows // ROWS))
    splits = ceil_div(rows, ceil_div(rows, splits))  # no split is empty
    with dev.scratch("sinks' partial sums", (splits, heads), F32) as partial:
        dev.launch(
            BACKWARD,
            (tiles, splits),
            THREADS,
            (partial, d_out, out, lse, sinks, *sizes, splits),
            consts={"HEAD_DIM": out.shape[3]},
            cost=BESIDE_ATTENTION,
        )
        finish_column_sum(dev, d_sinks, partial)


def _sizes(op: str, out: Tensor, sinks: Tensor, **statistics: Tensor) -> tuple[int, int, int]:
    """B, T and Hq of tensors that fit."""
    expect_float(op, "out", out)
    if len(out.shape) != 4 or out.shape[3] * out.dtype.itemsize % VECTOR_BYTES:
        raise ValueError(f"{op}: out must be (B, T, Hq, Hd) with Hd of 16 bytes, got {out.shape}")
    batch, seq_len, heads, _ = out.shape
    for name, tensor in statistics.items():
        expect(op, name, tensor, F32, (batch, heads, seq_len))
    expect(op, "sinks", sinks, out.dtype, (heads,))
    return batch, seq_len, heads
