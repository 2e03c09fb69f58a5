"""BF16 or F32 to signed bytes, with a scale for each row, or for each column of the transpose.

Elements that a product sums over must have one scale: rows are for operands as they lie (a token of
an activation, an output feature of a weight), columns for those that a product takes transposed.
"""

from llmq.base.dtypes import F32, I8, I32, STEP_SCALARS_WORDS
from llmq.base.operand import CODES_MULTIPLE, Stochastic, turned
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    FORWARD_WARPS,
    ROWS_MULTIPLE,
    VECTOR_BYTES,
    WARP,
    RowLayout,
    expect_float,
    octet_tiles,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
LANE_VECTORS = 8  # of a row, which lies in registers
WARPS = (1, 4, 16, 32)  # that may hold a row: few, because each is a compilation

_ROUNDING = "const i32*? scalars, u32 salt, i32 sequence, i64 rows, i32 cols"
ROWS = Kernel(
    "quantize/quantize_int8.cu",
    "quantize_int8_rows",
    args=f"i8* q, f32* scale, const T* x, const f32*? factors, {_ROUNDING}",
)
COLUMN_MAX = Kernel(
    "quantize/quantize_int8.cu",
    "quantize_int8_column_max",
    args="inout f32* column_max, const T* x, i64 rows, i32 cols",
)
COLUMNS = Kernel(
    "quantize/quantize_int8.cu",
    "quantize_int8_columns",
    args=f"i8* q_t, f32* scale, const T* x, const f32* column_max, {_ROUNDING}",
)
DECODE = Kernel(
    "quantize/quantize_int8.cu",
    "quantize_int8_decode",
    args="T* out, const i8* q, const f32* scale, i64 rows, i32 cols",
)


def rows(
    dev: Device,
    q: Tensor,
    scale: Tensor,
    x: Tensor,
    *,
    factors: Tensor | None = None,
    stochastic: Stochastic | None = None,
) -> None:
    """q = y / scale with y = x [* factors]; scale of a row = max(largest |y|, 1e-30) / 127.

    Rounded to nearest even, or stochastically. The scale of a row with an infinity or NaN is NaN.

    Args:
        q        out  I8           (rows, cols)
        scale    out  F32          (rows,)
        x        in   BF16 or F32  (rows, cols)  multiples of 4 and 16
        factors  in   F32          (cols,)  or None; of a matrix of which x is to be multiplied by
                                            codes without these scales of its rows
    """
    n, cols = _check(x, stochastic)
    expect("quantize_int8", "q", q, I8, x.shape)
    expect("quantize_int8", "scale", scale, F32, (n,))
    if factors is not None:
        expect("quantize_int8", "factors", factors, F32, (cols,))
    of_warp = WARP * LANE_VECTORS * VECTOR_BYTES // x.dtype.itemsize
    if cols > WARPS[-1] * of_warp:
        most = WARPS[-1] * of_warp
        raise ValueError(f"quantize_int8: x must have at most {most} columns, got {cols}")
    layout = RowLayout(next(warps for warps in WARPS if cols <= warps * of_warp), LANE_VECTORS)
    blocks, threads = layout.launch(n, FORWARD_WARPS, n)
    dev.launch(
        ROWS,
        blocks,
        threads,
        (q, scale, x, factors, *_rounding(stochastic), n, cols),
        consts={
            "WARPS": layout.warps,
            "FACTORS": int(factors is not None),
            "STOCHASTIC": int(stochastic is not None),
        },
    )


def columns(
    dev: Device, q_t: Tensor, scale: Tensor, x: Tensor, *, stochastic: Stochastic | None = None
) -> None:
    """q_t = the transpose of x / scale; scale of a column = max(largest |x|, 1e-30) / 127.

    Rounding and scales as those of `rows`.

    Args:
        q_t    out  I8           turned((rows, cols))
        scale  out  F32          (cols,)
        x      in   BF16 or F32  (rows, cols)  multiples of 4 and 16

    Cost:    x read twice, q_t written; two launches, and a scratch F32 (cols,) is cleared.
    """
    n, cols = _check(x, stochastic)
    expect("quantize_int8", "q_t", q_t, I8, turned((n, cols)))
    expect("quantize_int8", "scale", scale, F32, (cols,))
    tiles = octet_tiles("quantize_int8", n, cols)
    with dev.scratch("column_max", (cols,), F32) as column_max:
        dev.zero(column_max)
        dev.launch(COLUMN_MAX, tiles, THREADS, (column_max, x, n, cols))
        dev.launch(
            COLUMNS,
            tiles,
            THREADS,
            (q_t, scale, x, column_max, *_rounding(stochastic), n, cols),
            consts={"STOCHASTIC": int(stochastic is not None)},
        )


def largest_of_columns(dev: Device, column_max: Tensor, x: Tensor) -> None:
    """column_max = the largest |x| of each column; NaN is larger than everything.

    Args:
        column_max  out  F32          (cols,)
        x           in   BF16 or F32  (rows, cols)  multiples of 4 and 16
    """
    n, cols = _check(x, None)
    expect("quantize_int8", "column_max", column_max, F32, (cols,))
    dev.zero(column_max)
    tiles = octet_tiles("quantize_int8", n, cols)
    dev.launch(COLUMN_MAX, tiles, THREADS, (column_max, x, n, cols))


def decode(dev: Device, out: Tensor, q: Tensor, scale: Tensor) -> None:
    """out = q * scale of its row.

    Args:
        out    out  BF16 or F32  (rows, cols)  multiples of 4 and 16
        q      in   I8           (rows, cols)
        scale  in   F32          (rows,)
    """
    n, cols = _check(out, None)
    expect("quantize_int8", "q", q, I8, out.shape)
    expect("quantize_int8", "scale", scale, F32, (n,))
    dev.launch(DECODE, ceil_div(out.size, 4 * THREADS), THREADS, (out, q, scale, n, cols))


def _rounding(stochastic: Stochastic | None) -> tuple[Tensor | None, int, int]:
    return (None, 0, 1) if stochastic is None else tuple(stochastic)


def _check(x: Tensor, stochastic: Stochastic | None) -> tuple[int, int]:
    expect_float("quantize_int8", "x", x)
    if len(x.shape) != 2 or x.shape[0] % ROWS_MULTIPLE or x.shape[1] % CODES_MULTIPLE:
        raise ValueError(
            f"quantize_int8: x must be (rows, cols), in multiples of {ROWS_MULTIPLE} and "
            f"{CODES_MULTIPLE}, got {x.shape}"
        )
    if stochastic is not None:
        expect("quantize_int8", "scalars", stochastic.scalars, I32, (STEP_SCALARS_WORDS,))
        if stochastic.sequence % 4 or x.shape[0] % stochastic.sequence:
            raise ValueError(
                f"quantize_int8: sequence must be a multiple of 4 that divides the {x.shape[0]} "
                f"rows of x, got {stochastic.sequence}"
            )
    return x.shape


# -- Columns of an activation that signed bytes are too coarse for, and a product of these alone
#
# A few features of large language models are tens of times as large as the others, so that a row's
# codes would leave nothing of the rest (Dettmers et al., LLM.int8(), 2022).

SELECT_THREADS = 1024
THRESHOLD = 6.0  # the paper's
MOST = 64  # outliers of an activation: about ten times as many as the paper finds

SELECT_OUTLIERS = Kernel(
    "quantize/quantize_int8.cu",
    "outliers_select",
    args="f32* mask, i32* index, const f32* column_max, f32 threshold, i32 most, i32 cols",
)
TAKE_OUTLIERS = Kernel(
    "quantize/quantize_int8.cu",
    "outliers_take",
    args="T* out, const T* x, const i32* index, i64 rows, i32 cols, i32 most",
)
OUTLIER_WEIGHT = Kernel(
    "quantize/quantize_int8.cu",
    "outliers_weight",
    args="T* out, const i8* q, const f32* scale, const i32* index, i64 rows, i32 cols, i32 most",
)


def select_outliers(
    dev: Device, mask: Tensor, index: Tensor, column_max: Tensor, threshold: float
) -> None:
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
    dev.launch(SELECT_OUTLIERS, 1, SELECT_THREADS, args)


def take_outliers(dev: Device, out: Tensor, x: Tensor, index: Tensor) -> None:
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
    dev.launch(TAKE_OUTLIERS, ceil_div(out.size, THREADS), THREADS, (out, x, index, n, cols, most))


def outlier_weight(dev: Device, out: Tensor, q: Tensor, scale: Tensor, index: Tensor) -> None:
    """Do as `take_outliers` does, with codes q times the scales of their rows.

    Args:
        out    out  BF16 or F32 (rows, most)
        q      in   I8 (rows, cols)
        scale  in   F32 (rows,)
        index  in   I32 (most,)

    Cost, raises: as of take_outliers.
    """
    expect_float("outliers", "out", out)
    (n, cols), most = q.shape, index.size
    expect("outliers", "out", out, None, (n, most))
    expect("outliers", "q", q, I8, q.shape)
    expect("outliers", "scale", scale, F32, (n,))
    expect("outliers", "index", index, I32, (most,))
    args = (out, q, scale, index, n, cols, most)
    dev.launch(OUTLIER_WEIGHT, ceil_div(out.size, THREADS), THREADS, args)
