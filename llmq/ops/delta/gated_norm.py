"""RMSNorm over every head, times SiLU of a gate: the output of a gated delta net."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import finish_column_sum
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

_HEADS = "T[rows,heads*head_dim]"
_INPUTS = (
    f"{_HEADS} x, T[rows,columns] gate, T[head_dim] weight, f32 eps, i64 rows, i32 heads, "
    "i32 columns, i32 offset"
)
_RULES = {
    "where": "offset >= 0, offset + heads*head_dim <= columns",
    "gpu": "head_dim % 32, head_dim <= 256, columns % 2, offset % 2",
}
FORWARD = Kernel(
    "delta/gated_norm.cu", "gated_norm_forward", f"out {_HEADS} out, {_INPUTS}", **_RULES
)
BACKWARD = Kernel(
    "delta/gated_norm.cu",
    "gated_norm_backward",
    f"out {_HEADS} d_x, out T[rows,columns] d_gate, out f32[blocks,head_dim] partial, "
    f"{_HEADS} d_out, {_INPUTS}",
    **_RULES,
)

THREADS, WARPS = 256, 8
FORWARD_BLOCKS, BACKWARD_BLOCKS = 32, 6  # most blocks for a multiprocessor


def _sizes(x: Tensor, gate: Tensor, weight: Tensor, offset: int) -> tuple[int, int, int, int]:
    """rows, heads, columns, offset."""
    rows, columns, head_dim = FORWARD.dims(x=x, gate=gate, weight=weight)
    return rows, x.shape[1] // head_dim, columns, offset


def _launch(
    dev: Device, kernel: Kernel, blocks: int, args: tuple, eps: float, sizes: tuple, head_dim: int
) -> None:
    args, consts = (*args, eps, *sizes), {"HEAD_DIM": head_dim}
    dev.launch(kernel, blocks, THREADS, args, consts=consts, cost=BESIDE_ATTENTION)


def _blocks(dev: Device, sizes: tuple, most: int) -> int:
    return min(ceil_div(sizes[0] * sizes[1], WARPS), most * dev.num_sms)


def forward(
    dev: Device, out: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, offset: int
) -> None:
    """out = T(T(weight * T(rstd * x)) * silu(gate)), rstd = 1 / sqrt(mean(x^2) + eps) by head.

    gate: (rows, columns), read from column `offset` on.
    """
    sizes = _sizes(x, gate, weight, offset)
    blocks = _blocks(dev, sizes, FORWARD_BLOCKS)
    _launch(dev, FORWARD, blocks, (out, x, gate, weight), eps, sizes, weight.size)


def backward(
    dev: Device,
    d_x: Tensor,
    d_gate: Tensor,
    d_weight: Accumulator | None,
    d_out: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    offset: int,
) -> None:
    """Gradients of forward's inputs. Other columns of d_gate stay.

    Workspace: F32 (blocks, Hd).
    """
    sizes = _sizes(x, gate, weight, offset)
    blocks = _blocks(dev, sizes, BACKWARD_BLOCKS)
    with dev.scratch("gated_norm partial", (blocks, weight.size), F32) as partial:
        args = (d_x, d_gate, partial, d_out, x, gate, weight)
        _launch(dev, BACKWARD, blocks, args, eps, sizes, weight.size)
        finish_column_sum(dev, d_weight, partial)
