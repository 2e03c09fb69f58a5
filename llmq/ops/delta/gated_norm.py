"""RMSNorm over every head, times SiLU of a gate: behind the state of a gated delta net."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import expect_accumulator, expect_float, expect_head_dim, finish_column_sum
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

SIZES = "f32 eps, i64 rows, i32 heads, i32 columns, i32 offset"
FORWARD = Kernel(
    "delta/gated_norm.cu",
    "gated_norm_forward",
    args=f"T* out, const T* x, const T* gate, const T* weight, {SIZES}",
)
BACKWARD = Kernel(
    "delta/gated_norm.cu",
    "gated_norm_backward",
    args="T* d_x, T* d_gate, f32* partial, const T* d_out, const T* x, const T* gate, "
    f"const T* weight, {SIZES}",
)

HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 32, 256
THREADS, WARPS = 256, 8
FORWARD_BLOCKS, BACKWARD_BLOCKS = 32, 6  # at most, for a multiprocessor


def _sizes(
    op: str, dev: Device, x: Tensor, gate: Tensor, weight: Tensor, offset: int
) -> tuple[int, int, int, int]:
    """rows, heads, columns, offset of tensors that fit."""
    expect_float(op, "x", x)
    if any(len(t.shape) != n for t, n in ((x, 2), (gate, 2), (weight, 1))):
        raise ValueError(
            f"{op}: x and gate must be matrices and weight a vector, "
            f"got {x.shape}, {gate.shape}, {weight.shape}"
        )
    (rows, width), (head_dim,), columns = x.shape, weight.shape, gate.shape[1]
    expect_head_dim(op, dev, head_dim, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM)
    if width % head_dim or not 0 <= offset <= columns - width:
        raise ValueError(
            f"{op}: rows of {width} are no heads of {head_dim}, or gate has no such columns "
            f"from {offset} on: {columns}"
        )
    if dev.spec.capability > 0 and (columns % 2 or offset % 2):
        raise ValueError(
            f"{op}: columns and offset must be even on a GPU, got {columns} and {offset}"
        )
    expect(op, "gate", gate, x.dtype, (rows, columns))
    expect(op, "weight", weight, x.dtype, (head_dim,))
    return rows, width // head_dim, columns, offset


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
    """out = T(T(weight * T(rstd * x)) * silu(gate)), rstd = 1 / sqrt(mean(x^2) + eps) of a head.

    Args:
        out     out  T  (rows,heads*Hd)   F32 or BF16
        x       in   T  (rows,heads*Hd)
        gate    in   T  (rows,columns)    the heads, from column `offset` on
        weight  in   T  (Hd,)             Hd a multiple of 32 up to 256 (on a GPU)
    """
    op = "gated_norm.forward"
    sizes = _sizes(op, dev, x, gate, weight, offset)
    expect(op, "out", out, x.dtype, x.shape)
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
    """The gradients of forward's inputs.

    Args as forward's, and
        d_x       out    T          as x
        d_gate    out    T          as gate     the other columns stay as they are
        d_weight  inout  F32, BF16  (Hd,)       or None; added to when accumulating
        d_out     in     T          as out

    Workspace: F32 (blocks, Hd).
    """
    op = "gated_norm.backward"
    sizes = _sizes(op, dev, x, gate, weight, offset)
    for name, tensor, like in (("d_x", d_x, x), ("d_gate", d_gate, gate), ("d_out", d_out, x)):
        expect(op, name, tensor, x.dtype, like.shape)
    expect_accumulator(op, "d_weight", d_weight, weight.shape)
    blocks = _blocks(dev, sizes, BACKWARD_BLOCKS)
    with dev.scratch("gated_norm partial", (blocks, weight.size), F32) as partial:
        args = (d_x, d_gate, partial, d_out, x, gate, weight)
        _launch(dev, BACKWARD, blocks, args, eps, sizes, weight.size)
        finish_column_sum(dev, d_weight, partial)
