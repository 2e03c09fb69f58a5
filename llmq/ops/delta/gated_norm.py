"""RMSNorm over every head, gated by SiLU. Delta nets apply the gate behind the norm. State spaces
apply the gate in front of the norm, and a group of channels is a head."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import finish_column_sum
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

_HEADS = "T[rows,heads*head_dim]"
_INPUTS = (
    f"{_HEADS} x, T[rows,columns] gate, T[weights,head_dim] weight, f32 eps, i64 rows, i32 heads, "
    "i32 columns, i32 offset"
)
_RULES = {
    "where": "offset >= 0, offset + heads*head_dim <= columns, heads % weights",
    "gpu": "head_dim % (512 if head_dim > 2048 else 256 if head_dim > 256 else 32), "
    "head_dim <= 8192, columns % 2, offset % 2",
}
FORWARD = Kernel(
    "delta/gated_norm.cu", "gated_norm_forward", f"out {_HEADS} out, {_INPUTS}", **_RULES
)
BACKWARD = Kernel(
    "delta/gated_norm.cu",
    "gated_norm_backward",
    f"out {_HEADS} d_x, out T[rows,columns] d_gate, out f32[blocks,weights*head_dim] partial, "
    f"{_HEADS} d_out, {_INPUTS}",
    **_RULES,
)

WARPS = 8  # warps of a block; twice as many if a head has more than WIDE_HEAD channels
# Most channels of a head that one warp computes, and most that a block of WARPS warps computes.
WARP_HEAD, WIDE_HEAD = 256, 2048
FORWARD_BLOCKS, BACKWARD_BLOCKS = 32, 6  # most blocks per multiprocessor


def limits(head_dim: int) -> tuple[int, int]:
    """Return a divisor of head_dim that a GPU needs, and the largest head_dim."""
    return 512 if head_dim > WIDE_HEAD else 256 if head_dim > WARP_HEAD else 32, 8192


class _Call:
    """Sizes and launches of one call. Each head has a weight of its own, or all heads share one
    weight."""

    def __init__(
        self, dev: Device, x: Tensor, gate: Tensor, weight: Tensor, offset: int, gate_first: bool
    ):
        rows, columns, self.weights, head_dim = FORWARD.dims(x=x, gate=gate, weight=weight)
        heads = x.shape[1] // head_dim
        self.dev, self.sizes = dev, (rows, heads, columns, offset)
        self.consts = {"HEAD_DIM": head_dim, "GATE_FIRST": int(gate_first)}
        self.at_once = 1 if head_dim > WARP_HEAD else WARPS  # heads that a block computes at once
        self.threads = 32 * WARPS * (2 if head_dim > WIDE_HEAD else 1)
        self.shared = rows * heads // self.weights  # number of heads of all rows per weight

    def blocks(self, most: int) -> int:
        return min(ceil_div(self.shared, self.at_once), most * self.dev.num_sms)

    def launch(self, kernel: Kernel, blocks: int, args: tuple, eps: float) -> None:
        args, cost = (*args, eps, *self.sizes), BESIDE_ATTENTION
        grid = (blocks, self.weights)
        self.dev.launch(kernel, grid, self.threads, args, consts=self.consts, cost=cost)


def forward(
    dev: Device,
    out: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    offset: int,
    *,
    gate_first: bool = False,
) -> None:
    """out = T(T(weight * T(rstd * x)) * silu(gate)), rstd = 1 / sqrt(mean(x^2) + eps) by head.

    gate: (rows, columns), read from column `offset` on. weight: (1, Hd), or (heads, Hd).
    gate_first: the norm reads x * silu(gate), not rounded, in place of x, and no gate multiplies
    the norm's result.
    """
    call = _Call(dev, x, gate, weight, offset, gate_first)
    call.launch(FORWARD, call.blocks(FORWARD_BLOCKS), (out, x, gate, weight), eps)


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
    *,
    gate_first: bool = False,
) -> None:
    """Gradients of forward's inputs. Columns of d_gate that forward does not read as the gate stay
    as they are. d_weight: (weight.size,).

    Workspace: F32 (blocks, size of weight).
    """
    call = _Call(dev, x, gate, weight, offset, gate_first)
    blocks = call.blocks(BACKWARD_BLOCKS)
    with dev.scratch("gated_norm partial", (blocks, weight.size), F32) as partial:
        args = (d_x, d_gate, partial, d_out, x, gate, weight)
        call.launch(BACKWARD, blocks, args, eps)
        finish_column_sum(dev, d_weight, partial)
