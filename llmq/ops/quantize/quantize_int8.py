"""Conversion of BF16 or F32 to int8 with a scale for each row, or for each column and transposed.

Elements that a product sums together need the same scale. `rows` is for operands in memory order
(tokens of an activation, output features of a weight), `columns` for transposed operands.
"""

from llmq.base.dtypes import F32
from llmq.base.operand import Stochastic
from llmq.base.tensor import Tensor
from llmq.ops.common import FORWARD_WARPS, VECTOR_BYTES, WARP, RowLayout, octet_tiles
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
LANE_VECTORS = 8  # vectors of a row in a lane's registers
WARPS = (1, 4, 16, 32)  # possible warps of a row; few, because each number needs a compilation

_ROUNDING = "i32[16]? scalars, u32 salt, i32 sequence, i64 rows, i32 cols"
_MATRIX = "rows % 4, cols % 16"
ROWS = Kernel(
    "quantize/quantize_int8.cu",
    "quantize_int8_rows",
    f"out i8[rows,cols] q, out f32[rows] scale, T[rows,cols] x, f32[cols]? factors, {_ROUNDING}",
    where=f"{_MATRIX}, cols <= {WARPS[-1] * WARP * LANE_VECTORS} * vector_T",
)
COLUMN_MAX = Kernel(
    "quantize/quantize_int8.cu",
    "quantize_int8_column_max",
    "inout f32[cols] column_max, T[rows,cols] x, i64 rows, i32 cols",
    where=_MATRIX,
)
COLUMNS = Kernel(
    "quantize/quantize_int8.cu",
    "quantize_int8_columns",
    "out i8[cols,padded(rows)] q_t, out f32[cols] scale, T[rows,cols] x, f32[cols] column_max, "
    + _ROUNDING,
    where=_MATRIX,
)
DECODE = Kernel(
    "quantize/quantize_int8.cu",
    "quantize_int8_decode",
    "out T[rows,cols] out, i8[rows,cols] q, f32[rows] scale, i64 rows, i32 cols",
    where=_MATRIX,
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
    """Set q = y / scale with y = x [* factors]; the scale of a row is max(largest |y|, 1e-30) /
    127.

    Codes are rounded to nearest even, or stochastically. A row with an infinity or NaN has scale
    NaN. factors: F32 (cols,), row scales of the int8 matrix by which y will be multiplied.
    """
    n, cols = ROWS.dims(x=x)
    rounding = _rounding(stochastic, n)
    of_warp = WARP * LANE_VECTORS * VECTOR_BYTES // x.dtype.itemsize
    warps = next((warps for warps in WARPS if cols <= warps * of_warp), WARPS[-1])
    layout = RowLayout(warps, LANE_VECTORS)
    blocks, threads = layout.launch(n, FORWARD_WARPS, n)
    dev.launch(
        ROWS,
        blocks,
        threads,
        (q, scale, x, factors, *rounding, n, cols),
        consts={
            "WARPS": layout.warps,
            "FACTORS": int(factors is not None),
            "STOCHASTIC": int(stochastic is not None),
        },
    )


def columns(
    dev: Device, q_t: Tensor, scale: Tensor, x: Tensor, *, stochastic: Stochastic | None = None
) -> None:
    """Set q_t to the transpose of x / scale; the scale of a column is max(largest |x|, 1e-30) /
    127.

    Rounding and NaN: see `rows`.

    Cost:    x read twice, q_t written; two launches; scratch F32 (cols,), which is zeroed.
    """
    n, cols = COLUMNS.dims(x=x)
    rounding = _rounding(stochastic, n)
    tiles = octet_tiles(n, cols)
    with dev.scratch("column_max", (cols,), F32) as column_max:
        dev.zero(column_max)
        dev.launch(COLUMN_MAX, tiles, THREADS, (column_max, x, n, cols))
        dev.launch(
            COLUMNS,
            tiles,
            THREADS,
            (q_t, scale, x, column_max, *rounding, n, cols),
            consts={"STOCHASTIC": int(stochastic is not None)},
        )


def largest_of_columns(dev: Device, column_max: Tensor, x: Tensor) -> None:
    """Set column_max to the largest |x| of each column; NaN counts as largest."""
    n, cols = COLUMN_MAX.dims(x=x)
    dev.zero(column_max)
    tiles = octet_tiles(n, cols)
    dev.launch(COLUMN_MAX, tiles, THREADS, (column_max, x, n, cols))


def decode(dev: Device, out: Tensor, q: Tensor, scale: Tensor) -> None:
    """Set out = q * scale, with one scale for each row."""
    n, cols = DECODE.dims(q=q)
    dev.launch(DECODE, ceil_div(out.size, 4 * THREADS), THREADS, (out, q, scale, n, cols))


def _rounding(stochastic: Stochastic | None, rows: int) -> tuple[Tensor | None, int, int]:
    """Return the kernels' arguments about rounding. ValueError if `rows` rows are not whole
    sequences."""
    if stochastic is None:
        return None, 0, 1
    if stochastic.sequence % 4 or rows % stochastic.sequence:
        raise ValueError(
            f"quantize_int8: sequence must be a multiple of 4 that divides the {rows} rows of x, "
            f"got {stochastic.sequence}"
        )
    return tuple(stochastic)


# -- Outliers: columns of an activation that are multiplied in the activation's dtype
# A few features of large language models are tens of times larger than other features. int8 codes
# with the row's scale would round the other features to 0 (Dettmers et al., LLM.int8(), 2022).

SELECT_THREADS = 1024
THRESHOLD = 6.0  # least |x| of an outlier: the paper's value
MOST = 64  # most outliers of an activation: about ten times the number in the paper

SELECT_OUTLIERS = Kernel(
    "quantize/quantize_int8.cu",
    "outliers_select",
    "out f32[cols] mask, out i32[most] index, f32[cols] column_max, f32 threshold, i32 most, "
    "i32 cols",
)
TAKE_OUTLIERS = Kernel(
    "quantize/quantize_int8.cu",
    "outliers_take",
    "out T[rows,most] out, T[rows,cols] x, i32[most] index, i64 rows, i32 cols, i32 most",
)
OUTLIER_WEIGHT = Kernel(
    "quantize/quantize_int8.cu",
    "outliers_weight",
    "out T[rows,most] out, i8[rows,cols] q, f32[rows] scale, i32[most] index, i64 rows, i32 cols, "
    "i32 most",
)


def select_outliers(
    dev: Device, mask: Tensor, index: Tensor, column_max: Tensor, threshold: float
) -> None:
    """Mark the outliers: columns with an element beyond the threshold.

    If there are more outliers than places in index, a larger threshold is used.

    mask: 0 for outliers, 1 for other columns. index: outliers in ascending order, then -1.
    column_max: from `largest_of_columns`. threshold: at least 0.

    Cost:    one launch of a single block.
    """
    cols = column_max.size
    args = (mask, index, column_max, float(threshold), index.size, cols)
    dev.launch(SELECT_OUTLIERS, 1, SELECT_THREADS, args)


def take_outliers(dev: Device, out: Tensor, x: Tensor, index: Tensor) -> None:
    """Set out to the columns of x that index names, and to 0 where index is -1.

    Cost:    32 bytes of x read for each element of out; one launch.
    """
    (n, cols), most = TAKE_OUTLIERS.dims(x=x), index.size
    dev.launch(TAKE_OUTLIERS, ceil_div(out.size, THREADS), THREADS, (out, x, index, n, cols, most))


def outlier_weight(dev: Device, out: Tensor, q: Tensor, scale: Tensor, index: Tensor) -> None:
    """Set out to the columns of q * scale that index names, like `take_outliers`, at the same
    cost."""
    (n, cols), most = OUTLIER_WEIGHT.dims(q=q), index.size
    args = (out, q, scale, index, n, cols, most)
    dev.launch(OUTLIER_WEIGHT, ceil_div(out.size, THREADS), THREADS, args)
