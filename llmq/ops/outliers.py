"""Columns of an activation that signed bytes are too coarse for, and a product of these alone.

A few features of large language models are tens of times as large as the others. In a row's codes
they would leave nothing of the rest, so that they are multiplied in the model's own format
(Dettmers et al., LLM.int8(), 2022). How many there are is not known before; room is for a fixed
number.
"""

from llmq.base.dtypes import F32, I8, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS, SELECT_THREADS = 256, 1024
THRESHOLD = 6.0  # the paper's
MOST = 64  # outliers of an activation: about ten times as many as the paper finds

SELECT = Kernel(
    "outliers.cu",
    "outliers_select",
    args="f32* mask, i32* index, const f32* column_max, f32 threshold, i32 most, i32 cols",
)
TAKE = Kernel(
    "outliers.cu",
    "outliers_take",
    args="T* out, const T* x, const i32* index, i64 rows, i32 cols, i32 most",
)
WEIGHT = Kernel(
    "outliers.cu",
    "outliers_weight",
    args="T* out, const i8* q, const f32* scale, const i32* index, i64 rows, i32 cols, i32 most",
)


def select(dev: Device, mask: Tensor, index: Tensor, column_max: Tensor, threshold: float) -> None:
    """Mark the columns that are outliers: those with an element beyond the threshold.

    Where there are more than index has room for, those that are beyond a larger one.

    Args:
        mask        out  F32 (cols,)   0 of outliers, 1 of other columns
        index       out  I32 (most,)   outliers in ascending order, then -1
        column_max  in   F32 (cols,)   the largest element of each column, without its sign
        threshold   at least 0

    Cost:    one launch of a single block.
    """
    cols = column_max.size
    expect("outliers", "column_max", column_max, F32, (cols,))
    expect("outliers", "mask", mask, F32, (cols,))
    expect("outliers", "index", index, I32, (index.size,))
    args = (mask, index, column_max, float(threshold), index.size, cols)
    dev.launch(SELECT, 1, SELECT_THREADS, args)


def take(dev: Device, out: Tensor, x: Tensor, index: Tensor) -> None:
    """out = the columns of x that index names, 0 where it names none.

    Args (T is BF16 or F32):
        out    out  T (rows, most)
        x      in   T (rows, cols)
        index  in   I32 (most,)      columns in ascending order, then -1

    Cost:    32 bytes of x for each element; one launch.
    """
    expect_float("outliers", "x", x)
    (n, cols), most = x.shape, index.size
    expect("outliers", "out", out, x.dtype, (n, most))
    expect("outliers", "index", index, I32, (most,))
    dev.launch(TAKE, ceil_div(out.size, THREADS), THREADS, (out, x, index, n, cols, most))


def weight(dev: Device, out: Tensor, q: Tensor, scale: Tensor, index: Tensor) -> None:
    """Do as `take` does, with codes q times the scales of their rows.

    Args:
        out    out  BF16 or F32 (rows, most)
        q      in   I8 (rows, cols)
        scale  in   F32 (rows,)
        index  in   I32 (most,)

    Cost, raises: as of take.
    """
    expect_float("outliers", "out", out)
    (n, cols), most = q.shape, index.size
    expect("outliers", "out", out, None, (n, most))
    expect("outliers", "q", q, I8, q.shape)
    expect("outliers", "scale", scale, F32, (n,))
    expect("outliers", "index", index, I32, (most,))
    args = (out, q, scale, index, n, cols, most)
    dev.launch(WEIGHT, ceil_div(out.size, THREADS), THREADS, args)
