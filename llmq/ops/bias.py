"""The gradient of a bias: column sums. The kernels are declared in common.py."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    BIAS_BACKWARD,
    VECTOR_BYTES,
    expect_accumulator,
    expect_float,
    finish_column_sum,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import ceil_div

THREADS = 256
LANES = 16  # threads side by side, 16 bytes each: the width of a tile; LANES in cu/bias.cu


def grid(rows: int, N: int, itemsize: int, num_sms: int) -> tuple[int, int]:
    """(tiles of columns, splits of the rows): 3 blocks per multiprocessor, which run at once.

    A split has at least 64 rows, four per thread.
    """
    tiles = ceil_div(N * itemsize, VECTOR_BYTES * LANES)
    splits = max(1, min(3 * num_sms // tiles, rows // 64))
    return tiles, ceil_div(rows, ceil_div(rows, splits))  # no split is empty


def backward(dev: Device, d_bias: Accumulator, d_out: Tensor) -> None:
    """d_bias = sum of d_out over all but the last dimension, summed in F32 in a fixed order.

    Args (T is BF16 or F32, G is BF16 or F32):
        d_bias  inout  Accumulator G (N,)
        d_out   in     T (*S, N)   N a multiple of 16 bytes

    Workspace: splits * N F32.
    """
    op = "bias.backward"
    expect_float(op, "d_out", d_out)
    N, itemsize = d_out.shape[-1], d_out.dtype.itemsize
    rows = d_out.size // N
    if N * itemsize % VECTOR_BYTES:
        raise ValueError(f"{op}: N must be a multiple of {VECTOR_BYTES // itemsize}, got {N}")
    expect_accumulator(op, "d_bias", d_bias, (N,))
    tiles, splits = grid(rows, N, itemsize, dev.num_sms)
    with dev.scratch("bias partial sums", (splits, N), F32) as partial:
        dev.launch(BIAS_BACKWARD, (tiles, splits), THREADS, (partial, d_out, rows, N, splits))
        finish_column_sum(dev, d_bias, partial)
