"""Sums of tensors that are added to a gradient, and column sums for the gradient of a bias."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import BIAS_BACKWARD, VECTOR_BYTES, finish_column_sum
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
PER_THREAD = 8  # elements of a thread
MAX_PARTS = 8

_PARTS = ", ".join(f"T[*n]? part{i}" for i in range(MAX_PARTS))
REDUCE_SUM = Kernel(
    "pointwise/reduce.cu",
    "reduce_sum",
    f"inout G[*n] d_sum, {_PARTS}, i32[16] scalars, i32 accumulate, u32 salt, i64 first, i64 n",
    where="first % 128, first >= 0",
)


def add(dev: Device, acc: Accumulator, x: Tensor) -> None:
    """acc.tensor += x, or = x if acc.accumulate is False; rounded as in `sum_parts`."""
    sum_parts(dev, acc, [x])


def sum_parts(dev: Device, acc: Accumulator, parts: list[Tensor], first: int = 0) -> None:
    """acc.tensor = (acc.tensor if acc.accumulate else 0) + parts[0] + parts[1] + ...

    The terms are added in this order in F32, and the sum is rounded once: stochastically if
    acc.tensor is BF16 and there is an addition, else to nearest.

    parts: 1 to 8 tensors of one dtype and of acc.tensor's shape, in device or pinned memory; one of
    the tensors may be acc.tensor. first: element of a slab at which acc.tensor begins, a multiple
    of 128; random numbers depend on the element of the slab.
    """
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"reduce: parts must be 1 to {MAX_PARTS} tensors, got {len(parts)}")
    missing = [None] * (MAX_PARTS - len(parts))
    n = parts[0].size
    scalars = (acc.scalars, int(acc.accumulate), acc.salt, first, n)
    dev.launch(
        REDUCE_SUM,
        ceil_div(n, THREADS * PER_THREAD),
        THREADS,
        (acc.tensor, *parts, *missing, *scalars),
        consts={"PARTS": len(parts)},
    )


# -- The gradient of a bias. The kernels are declared in common.py.

LANES = 16  # threads across a tile, 16 bytes each; LANES in cu/pointwise/reduce.cu


def bias_grid(rows: int, N: int, width: int, num_sms: int) -> tuple[int, int]:
    """(tiles of columns, splits of rows) for 3 blocks per multiprocessor, which run at once. A
    split has at least 64 rows, four per thread. width: columns of a thread."""
    tiles = ceil_div(N, width * LANES)
    splits = max(1, min(3 * num_sms // tiles, rows // 64))
    return tiles, ceil_div(rows, ceil_div(rows, splits))  # no split is empty


def bias_gradient(dev: Device, d_bias: Accumulator, d_out: Tensor) -> None:
    """d_bias = or += sum of d_out over all but the last dimension, in F32 in a fixed order.

    Cost:    d_out read once, by elements unless a row is a multiple of 16 bytes; two launches;
             F32 (splits, N) of workspace.
    """
    (rows, N), itemsize = BIAS_BACKWARD.dims(d_out=d_out), d_out.dtype.itemsize
    wide = N * itemsize % VECTOR_BYTES == 0
    tiles, splits = bias_grid(rows, N, VECTOR_BYTES // itemsize if wide else 1, dev.num_sms)
    consts = {} if wide else {"WIDE": 0}
    with dev.scratch("bias partial sums", (splits, N), F32) as partial:
        args = (partial, d_out, rows, N, splits)
        dev.launch(BIAS_BACKWARD, (tiles, splits), THREADS, args, consts=consts)
        finish_column_sum(dev, d_bias, partial)
