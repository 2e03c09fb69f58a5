"""Add tensors to a gradient; and the gradient of a bias, column sums."""

from llmq.base.dtypes import F32, I32, STEP_SCALARS_WORDS
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    BIAS_BACKWARD,
    VECTOR_BYTES,
    expect_accumulator,
    expect_float,
    finish_column_sum,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_THREAD = 8  # elements
MAX_PARTS = 8
FIRST_MULTIPLE = 128  # elements, as everywhere that parts of slabs start

_PARTS = ", ".join(f"const T*? part{i}" for i in range(MAX_PARTS))
REDUCE_SUM = Kernel(
    "pointwise/reduce.cu",
    "reduce_sum",
    args=f"inout G* d_sum, {_PARTS}, "
    "const i32* scalars, i32 accumulate, u32 salt, i64 first, i64 n",
)


def add(dev: Device, acc: Accumulator, x: Tensor) -> None:
    """acc.tensor += x, or = x where acc.accumulate is false.

    Args:
        acc.tensor   inout  F32 or BF16, x's shape; BF16 sums are rounded stochastically
        x            in     F32 or BF16, any shape
    """
    sum_parts(dev, acc, [x])


def sum_parts(dev: Device, acc: Accumulator, parts: list[Tensor], first: int = 0) -> None:
    """acc.tensor = (acc.tensor if acc.accumulate else 0) + parts[0] + parts[1] + ...

    Added in this order in F32 and rounded once: stochastically where acc.tensor is BF16 and there
    is anything to add, else to nearest.

    Args:
        acc.tensor   inout  F32 or BF16, any shape; may be one of the parts
        parts        in     1 to 8 tensors, all F32 or all BF16, of this shape; of any place, also
                            pinned memory
        first        a multiple of 128: where acc.tensor starts in the tensor that it is a part of;
                     the random numbers are those of the whole
    """
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"reduce: parts must be 1 to {MAX_PARTS} tensors, got {len(parts)}")
    if first < 0 or first % FIRST_MULTIPLE:
        raise ValueError(f"reduce: first must be a multiple of {FIRST_MULTIPLE}, got {first}")
    shape = parts[0].shape
    expect("reduce", "acc.tensor", acc.tensor, None, shape)
    expect("reduce", "acc.scalars", acc.scalars, I32, (STEP_SCALARS_WORDS,))
    expect_float("reduce", "acc.tensor", acc.tensor)
    expect_float("reduce", "parts[0]", parts[0])
    for i, part in enumerate(parts):
        expect("reduce", f"parts[{i}]", part, parts[0].dtype, shape)
    missing = [None] * (MAX_PARTS - len(parts))
    n = acc.tensor.size
    scalars = (acc.scalars, int(acc.accumulate), acc.salt, first, n)
    dev.launch(
        REDUCE_SUM,
        ceil_div(n, THREADS * PER_THREAD),
        THREADS,
        (acc.tensor, *parts, *missing, *scalars),
        consts={"PARTS": len(parts)},
    )


# -- The gradient of a bias. The kernels are declared in common.py.

LANES = (
    16  # threads side by side, 16 bytes each: the width of a tile; LANES in cu/pointwise/reduce.cu
)


def bias_grid(rows: int, N: int, width: int, num_sms: int) -> tuple[int, int]:
    """(tiles of columns, splits of the rows): 3 blocks per multiprocessor, which run at once. A
    split has at least 64 rows, four per thread. width: columns of a thread."""
    tiles = ceil_div(N, width * LANES)
    splits = max(1, min(3 * num_sms // tiles, rows // 64))
    return tiles, ceil_div(rows, ceil_div(rows, splits))  # no split is empty


def bias_gradient(dev: Device, d_bias: Accumulator, d_out: Tensor) -> None:
    """d_bias = sum of d_out over all but the last dimension, summed in F32 in a fixed order.

    Args (T is BF16 or F32, G is BF16 or F32):
        d_bias  inout  Accumulator G (N,)
        d_out   in     T (*S, N)

    Workspace: splits * N F32. Cost: d_out read once, by elements unless N is a multiple of 16
    bytes; two launches.
    """
    op = "bias.backward"
    expect_float(op, "d_out", d_out)
    N, itemsize = d_out.shape[-1], d_out.dtype.itemsize
    rows = d_out.size // N
    expect_accumulator(op, "d_bias", d_bias, (N,))
    wide = N * itemsize % VECTOR_BYTES == 0
    tiles, splits = bias_grid(rows, N, VECTOR_BYTES // itemsize if wide else 1, dev.num_sms)
    consts = {} if wide else {"WIDE": 0}
    with dev.scratch("bias partial sums", (splits, N), F32) as partial:
        args = (partial, d_out, rows, N, splits)
        dev.launch(BIAS_BACKWARD, (tiles, splits), THREADS, args, consts=consts)
        finish_column_sum(dev, d_bias, partial)
