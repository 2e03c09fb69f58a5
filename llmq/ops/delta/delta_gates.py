"""Decays and betas of delta nets and state spaces, made from one or two columns per value head."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import finish_column_sum
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

_GATES = "f32[*rows,2,heads]"
_INPUTS = (
    "sparse T[rows,columns] x, T[heads] a_log, T[heads] dt_bias, f32 least, i64 rows, i32 heads, "
    "i32 columns, i32 offset, i32 parts"
)
_COLUMNS = "offset >= 0, offset + parts*heads <= columns"
FORWARD = Kernel(
    "delta/delta_gates.cu", "delta_gates_forward", f"out {_GATES} gates, {_INPUTS}", where=_COLUMNS
)
BACKWARD = Kernel(
    "delta/delta_gates.cu",
    "delta_gates_backward",
    "sparse out T[rows,columns] d_x, out f32[blocks,heads] a_log_partial, "
    f"out f32[blocks,heads] dt_bias_partial, {_GATES} d_gates, {_GATES} gates, {_INPUTS}",
    where=_COLUMNS,
)

THREADS, ROWS = 256, 32  # threads and rows of a block


def _grid(rows: int, heads: int) -> tuple[int, int]:
    return ceil_div(heads, 32), ceil_div(rows, ROWS)


def forward(
    dev: Device,
    gates: Tensor,
    x: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    offset: int,
    parts: int = 2,
    least: float = 0.0,
) -> None:
    """decay = -exp(a_log) * step, beta = sigmoid(b), step = max(softplus(a + dt_bias), least).

    gates: (rows, 2, heads), decays, then betas. x: has the columns b from `offset` on, then a.
    parts: 2 for a delta net; 1 for a state space, which has no b and whose beta is step. least: the
    least step.
    """
    rows, columns, heads = FORWARD.dims(x=x, a_log=a_log)
    args = (gates, x, a_log, dt_bias, least, rows, heads, columns, offset, parts)
    dev.launch(FORWARD, _grid(rows, heads), THREADS, args, cost=BESIDE_ATTENTION)


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
    parts: int = 2,
    least: float = 0.0,
) -> None:
    """Gradients of forward's inputs. Columns of d_x that forward does not read stay as they are.

    Workspace: two F32 per head for every 32 rows.
    """
    rows, columns, heads = BACKWARD.dims(x=x, a_log=a_log)
    sizes, grid = (rows, heads, columns, offset, parts), _grid(rows, heads)
    with (
        dev.scratch("a_log_partial", (grid[1], heads), F32) as of_a_log,
        dev.scratch("dt_bias_partial", (grid[1], heads), F32) as of_dt_bias,
    ):
        args = (d_x, of_a_log, of_dt_bias, d_gates, gates, x, a_log, dt_bias, least, *sizes)
        dev.launch(BACKWARD, grid, THREADS, args, cost=BESIDE_ATTENTION)
        finish_column_sum(dev, d_a_log, of_a_log)
        finish_column_sum(dev, d_dt_bias, of_dt_bias)
