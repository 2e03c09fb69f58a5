"""Gates of attention's output: the sigmoid of a gate for each channel, or attention sinks."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import VECTOR_BYTES, finish_column_sum
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

SIZES = "i64 rows, i32 heads, i32 kv_heads"
_HD = "(columns // (2*(heads + kv_heads)))"
_QKV, _GATE = f"T[rows,(heads + 2*kv_heads)*{_HD}] qkv", f"T[rows,heads*{_HD}] gate"
_RULES = {"where": "columns % (2*(heads + kv_heads))", "gpu": f"{_HD} % 8"}
SPLIT = Kernel(
    "attention/attention_gate.cu",
    "attention_gate_split",
    f"out {_QKV}, out {_GATE}, T[rows,columns] product, {SIZES}",
    **_RULES,
)
MERGE = Kernel(
    "attention/attention_gate.cu",
    "attention_gate_merge",
    f"out T[rows,columns] product, {_QKV}, {_GATE}, {SIZES}",
    **_RULES,
)
FORWARD = Kernel(
    "attention/attention_gate.cu",
    "attention_gate_forward",
    "out T[*n] out, T[*n] x, T[*n] gate, i64 n",
    gpu="n % 8",
)
BACKWARD = Kernel(
    "attention/attention_gate.cu",
    "attention_gate_backward",
    "out T[*n] d_x, out T[*n] d_gate, T[*n] d_out, T[*n] x, T[*n] gate, i64 n",
    gpu="n % 8",
)

THREADS, MULTIPLE = 256, 8  # threads of a block; a head's channels are a multiple of 8


def _launch(dev: Device, kernel: Kernel, size: int, args: tuple, head_dim: int) -> None:
    """Launch a kernel on `size` elements, with one vector for each thread."""
    blocks = ceil_div(size * args[0].dtype.itemsize, VECTOR_BYTES * THREADS)
    dev.launch(kernel, blocks, THREADS, args, consts={"HEAD_DIM": head_dim}, cost=BESIDE_ATTENTION)


def split(
    dev: Device, qkv: Tensor, gate: Tensor, product: Tensor, heads: int, kv_heads: int
) -> None:
    """Split product into the heads qkv and the gates. Its heads are in the order: query 0, gate 0,
    query 1, gate 1, ..., keys, values."""
    _split(dev, SPLIT, (qkv, gate, product), product, heads, kv_heads)


def merge(
    dev: Device, product: Tensor, qkv: Tensor, gate: Tensor, heads: int, kv_heads: int
) -> None:
    """Join gradients of qkv and gate in product's order: the inverse of split."""
    _split(dev, MERGE, (product, qkv, gate), product, heads, kv_heads)


def _split(
    dev: Device, kernel: Kernel, tensors: tuple, product: Tensor, heads: int, kv_heads: int
) -> None:
    rows, columns = kernel.dims(product=product)
    head_dim = columns // (2 * (heads + kv_heads))
    _launch(dev, kernel, product.size, (*tensors, rows, heads, kv_heads), head_dim)


def forward(dev: Device, out: Tensor, x: Tensor, gate: Tensor) -> None:
    """out = x * sigmoid(gate)."""
    _launch(dev, FORWARD, out.size, (out, x, gate, out.size), MULTIPLE)


def backward(
    dev: Device, d_x: Tensor, d_gate: Tensor, d_out: Tensor, x: Tensor, gate: Tensor
) -> None:
    """d_x = d_out * s, d_gate = d_out * x * s * (1 - s), with s = sigmoid(gate). d_x may be
    d_out."""
    _launch(dev, BACKWARD, x.size, (d_x, d_gate, d_out, x, gate, x.size), MULTIPLE)


# -- Attention sinks: each query head has one more score, whose value vector is zero
#
# These kernels run after any attention kernel; attention's backward stays the same. delta is the
# dot product of d_out and out in each row, and d_sink = - sum over rows of exp(sink - lse) * delta.

ROWS = 64  # least number of rows of a split

_SINKS_SIZES = "i32 batch, i32 seq_len, i32 heads"
_ROWS, _STATISTICS = "T[batch,seq_len,heads,Hd]", "f32[batch,heads,seq_len]"
SINKS_FORWARD = Kernel(
    "attention/attention_gate.cu",
    "attention_sinks_forward",
    f"inout {_ROWS} out, out {_STATISTICS} lse, {_STATISTICS} without, T[heads] sinks, "
    + _SINKS_SIZES,
    gpu="Hd % vector_T",
)
SINKS_BACKWARD = Kernel(
    "attention/attention_gate.cu",
    "attention_sinks_backward",
    f"out f32[splits,heads] partial, {_ROWS} d_out, {_ROWS} out, {_STATISTICS} lse, "
    f"T[heads] sinks, {_SINKS_SIZES}, i32 splits",
    gpu="Hd % vector_T",
)


def sinks_forward(dev: Device, out: Tensor, lse: Tensor, without: Tensor, sinks: Tensor) -> None:
    """out *= sigmoid(without - sink) and lse = log(exp(without) + exp(sink)), for each head.

    without: the lse of attention without sinks, not in the memory of lse.
    """
    *sizes, head_dim = SINKS_FORWARD.dims(out=out)
    _launch(dev, SINKS_FORWARD, out.size, (out, lse, without, sinks, *sizes), head_dim)


def sinks_backward(
    dev: Device, d_sinks: Accumulator, d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor
) -> None:
    """d_sinks = or += - sum over rows of exp(sink - lse) * (d_out . out), in a fixed order; "." is
    the dot product of two rows.

    out, lse: the results of sinks_forward.

    Cost:    d_out and out read once; two launches.
    """
    *sizes, head_dim = SINKS_BACKWARD.dims(out=out)
    batch, seq_len, heads = sizes
    vectors = max(head_dim * out.dtype.itemsize // VECTOR_BYTES, 1)
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
            consts={"HEAD_DIM": head_dim},
            cost=BESIDE_ATTENTION,
        )
        finish_column_sum(dev, d_sinks, partial)
