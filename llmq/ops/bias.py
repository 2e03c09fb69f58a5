"""The gradient of a bias: column sums."""

from __future__ import annotations

from llmq.base.dtypes import F32, I32, STEP_SCALARS_WORDS
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import COLUMN_SUM_COLUMNS, COLUMN_SUM_THREADS, VECTOR_BYTES, expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
LANES = 16  # threads side by side, 16 bytes each: the width of a tile; LANES in cu/bias.cu

BACKWARD = Kernel(
    "bias.cu",
    "bias_backward",
    args="f32* partial, const T* d_out, i64 rows, i32 N, i32 splits",
)
FINISH = Kernel(
    "bias.cu",
    "bias_finish",
    args="inout G* d_bias, const f32* partial, const i32* scalars, i32 N, i32 splits, "
    "i32 accumulate, u32 salt",
)


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

    Workspace: splits * N F32. Raises: TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "bias.backward"
    tensor, accumulate, scalars, salt = d_bias
    expect_float(op, "d_out", d_out)
    expect_float(op, "d_bias", tensor)
    N, itemsize = d_out.shape[-1], d_out.dtype.itemsize
    rows = d_out.size // N
    if N * itemsize % VECTOR_BYTES:
        raise ValueError(f"{op}: N must be a multiple of {VECTOR_BYTES // itemsize}, got {N}")
    expect(op, "d_bias", tensor, None, (N,))
    expect(op, "scalars", scalars, I32, (STEP_SCALARS_WORDS,))
    tiles, splits = grid(rows, N, itemsize, dev.num_sms)
    with dev.scratch("bias partial sums", (splits, N), F32) as partial:
        dev.launch(BACKWARD, (tiles, splits), THREADS, (partial, d_out, rows, N, splits))
        dev.launch(
            FINISH,
            ceil_div(N, COLUMN_SUM_COLUMNS),
            COLUMN_SUM_THREADS,
            (tensor, partial, scalars, N, splits, int(accumulate), salt),
        )
