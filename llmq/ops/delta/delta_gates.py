"""Decays and betas of a gated delta net, from two columns of a product for each value head."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import expect_accumulator, expect_float, finish_column_sum
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

SIZES = "i64 rows, i32 heads, i32 columns, i32 offset"
FORWARD = Kernel(
    "delta/delta_gates.cu",
    "delta_gates_forward",
    args=f"f32* gates, sparse const T* x, const T* a_log, const T* dt_bias, {SIZES}",
)
BACKWARD = Kernel(
    "delta/delta_gates.cu",
    "delta_gates_backward",
    args="sparse T* d_x, f32* a_log_partial, f32* dt_bias_partial, const f32* d_gates, "
    f"const f32* gates, sparse const T* x, const T* a_log, const T* dt_bias, {SIZES}",
)

THREADS, ROWS = 256, 32  # rows of a block


def _sizes(
    op: str, gates: Tensor, x: Tensor, a_log: Tensor, dt_bias: Tensor, offset: int
) -> tuple[int, int, int, int]:
    """rows, heads, columns, offset of tensors that fit."""
    expect_float(op, "x", x)
    if len(x.shape) != 2 or len(a_log.shape) != 1:
        raise ValueError(
            f"{op}: x must be a matrix and a_log a vector, got {x.shape} and {a_log.shape}"
        )
    (rows, columns), (heads,) = x.shape, a_log.shape
    if not 0 <= offset <= columns - 2 * heads:
        raise ValueError(f"{op}: x has no {2 * heads} columns from {offset} on: {columns}")
    expect(op, "a_log", a_log, x.dtype, (heads,))
    expect(op, "dt_bias", dt_bias, x.dtype, (heads,))
    if gates.size != rows * 2 * heads:
        raise ValueError(f"{op}: gates must have {rows * 2 * heads} elements, got {gates.shape}")
    expect(op, "gates", gates, F32, gates.shape)
    return rows, heads, columns, offset


def _grid(rows: int, heads: int) -> tuple[int, int]:
    return ceil_div(heads, 32), ceil_div(rows, ROWS)


def forward(
    dev: Device, gates: Tensor, x: Tensor, a_log: Tensor, dt_bias: Tensor, offset: int
) -> None:
    """decay = -exp(a_log) * softplus(a + dt_bias), beta = sigmoid(b).

    Args:
        gates    out  F32 (..., 2, heads)  of all rows: decays, betas
        x        in   T   (rows,columns)   F32 or BF16; b from column `offset` on, then a
        a_log    in   T   (heads,)
        dt_bias  in   T   (heads,)
    """
    sizes = _sizes("delta_gates.forward", gates, x, a_log, dt_bias, offset)
    args, grid = (gates, x, a_log, dt_bias, *sizes), _grid(*sizes[:2])
    dev.launch(FORWARD, grid, THREADS, args, cost=BESIDE_ATTENTION)


def backward(
    dev: Device,
    d_x: Tensor,
    d_a_log: Accumulator | None,
    d_dt_bias: Accumulator | None,
    d_gates: Tensor,
    gates: Tensor,
    x: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    offset: int,
) -> None:
    """The gradients of forward's inputs.

    Args as forward's, and
        d_x        out    T          as x       the other columns stay as they are
        d_a_log    inout  F32, BF16  (heads,)   or None; added to when accumulating
        d_dt_bias  inout  F32, BF16  (heads,)   the same
        d_gates    in     F32        as gates

    Workspace: two F32 for a head and every 32 rows.
    """
    op = "delta_gates.backward"
    sizes = rows, heads, *_ = _sizes(op, gates, x, a_log, dt_bias, offset)
    expect(op, "d_x", d_x, x.dtype, x.shape)
    expect(op, "d_gates", d_gates, F32, gates.shape)
    expect_accumulator(op, "d_a_log", d_a_log, (heads,))
    expect_accumulator(op, "d_dt_bias", d_dt_bias, (heads,))
    grid = _grid(rows, heads)
    with (
        dev.scratch("a_log_partial", (grid[1], heads), F32) as of_a_log,
        dev.scratch("dt_bias_partial", (grid[1], heads), F32) as of_dt_bias,
    ):
        args = (d_x, of_a_log, of_dt_bias, d_gates, gates, x, a_log, dt_bias, *sizes)
        dev.launch(BACKWARD, grid, THREADS, args, cost=BESIDE_ATTENTION)
        finish_column_sum(dev, d_a_log, of_a_log)
        finish_column_sum(dev, d_dt_bias, of_dt_bias)
