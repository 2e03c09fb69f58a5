"""RMSNorm over the channels, alone and fused with the residual addition before or after it."""

from __future__ import annotations

from llmq.base.dtypes import F32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    ANY_ROWS,
    BACKWARD_WARPS,
    FORWARD_WARPS,
    ROW_ARGS,
    expect_rows,
    finish_column_sum,
    out_consts,
    row_launch,
    row_layout,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

RMSNORM_FORWARD = Kernel(
    "rmsnorm.cu",
    "rmsnorm_forward",
    args="T*? out, f32* rstd, const T* x, const T* weight, f32 eps, i64 rows, i32 C, " + ROW_ARGS,
)
RMSNORM_FORWARD_RESIDUAL = Kernel(
    "rmsnorm.cu",
    "rmsnorm_forward_residual",
    args="T* residual_out, T*? out, f32* rstd, const T* residual, const T* branch, "
    "const T* weight, f32 eps, i64 rows, i32 C, " + ROW_ARGS,
)
RMSNORM_POST = Kernel(
    "rmsnorm.cu",
    "rmsnorm_post",
    args="T* out, f32* rstd, const T* x, const T*? residual, const T* weight, f32 eps, i64 rows, "
    "i32 C, " + ROW_ARGS,
)
RMSNORM_BACKWARD = Kernel(
    "rmsnorm.cu",
    "rmsnorm_backward",
    args="T* d_x, f32* partial, const T* d_out, const T* x, const T* weight, const f32* rstd, "
    "const T*? d_residual, i64 rows, i32 C, " + ROW_ARGS,
)
RMSNORM_BACKWARD_WEIGHT = Kernel(
    "rmsnorm.cu",
    "rmsnorm_backward_weight",
    args="inout G* d_weight, const f32* partial, const i32* scalars, i32 num_partials, i32 C, "
    "i32 accumulate, u32 salt",
)

LANE_VECTORS = 4  # as many as the backward kernel has registers for, two blocks on an SM
# Forward: far more blocks than run at a time, so that loads of new ones fill the gaps of old ones.
# (32768, 896) BF16 on an H100: 92 % of a copy's bandwidth, 80 % with 8 blocks.
FORWARD = {"block_warps": FORWARD_WARPS, "blocks_per_sm": 64}
BACKWARD = {"block_warps": BACKWARD_WARPS, "blocks_per_sm": 2}


def forward(
    dev: Device,
    out: Tensor | None,
    rstd: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """out = T(T(rstd * x) * weight), rstd = 1 / sqrt(mean(x^2) + eps): rounds as HF does.

    Args:
        out      out    T   (rows,C)  F32 or BF16; or None where fp8 is all that is wanted
        rstd     out    F32 (rows,)
        x        in     T   (rows,C)  C a multiple of 8, at most 8192
        weight   in     T   (C,)
        abs_max  inout  F32 (1,)      or None; raised to the largest |out|
        fp8      out    Fp8Out        or None; out once more, as FP8 codes

    Cost:    x read once, out written once; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "rmsnorm.forward"
    rows, C = expect_rows(op, "x", x)
    consts = out_consts(op, out, x.dtype, (rows, C), fp8)
    expect(op, "rstd", rstd, F32, (rows,))
    expect(op, "weight", weight, x.dtype, (C,))
    layout = row_layout(C, x.dtype.itemsize, LANE_VECTORS)
    launch = row_launch(op, dev, layout, rows, C, abs_max=abs_max, fp8=fp8, **FORWARD)
    dev.launch(
        RMSNORM_FORWARD,
        launch.blocks,
        launch.threads,
        (out, rstd, x, weight, eps, rows, C, *launch.args),
        consts=launch.consts | consts,
    )


def forward_residual(
    dev: Device,
    residual_out: Tensor,
    out: Tensor | None,
    rstd: Tensor,
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    eps: float,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """residual_out = T(residual + branch); out and rstd = RMSNorm of the rounded sum.

    Args:
        residual_out  out    T   (rows,C)  may be residual
        out           out    T   (rows,C)  F32 or BF16; or None with fp8
        rstd          out    F32 (rows,)
        residual      in     T   (rows,C)  C a multiple of 8, at most 8192
        branch        in     T   (rows,C)
        weight        in     T   (C,)
        abs_max       inout  F32 (1,)      or None; raised to the largest |out|
        fp8           out    Fp8Out        or None; out once more, as FP8 codes

    Cost:    two reads and two writes of (rows,C); one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "rmsnorm.forward_residual"
    rows, C = expect_rows(op, "residual", residual)
    consts = out_consts(op, out, residual.dtype, (rows, C), fp8)
    for name, tensor in (("residual_out", residual_out), ("branch", branch)):
        expect(op, name, tensor, residual.dtype, (rows, C))
    expect(op, "rstd", rstd, F32, (rows,))
    expect(op, "weight", weight, residual.dtype, (C,))
    layout = row_layout(C, residual.dtype.itemsize, LANE_VECTORS)
    launch = row_launch(op, dev, layout, rows, C, abs_max=abs_max, fp8=fp8, **FORWARD)
    dev.launch(
        RMSNORM_FORWARD_RESIDUAL,
        launch.blocks,
        launch.threads,
        (residual_out, out, rstd, residual, branch, weight, eps, rows, C, *launch.args),
        consts=launch.consts | consts,
    )


def post(
    dev: Device,
    out: Tensor,
    rstd: Tensor,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """out = T(residual + T(rstd * x * weight)), or without the sum; rounds as HF's Olmo2 does.

    Its backward pass is `backward` without d_residual: the residual's gradient is out's.

    Args:
        out       out    T   (rows,C)  F32 or BF16; may be residual
        rstd      out    F32 (rows,)   1 / sqrt(mean(x^2) + eps)
        x         in     T   (rows,C)  C a multiple of 8, at most 8192
        residual  in     T   (rows,C)  or None
        weight    in     T   (C,)
        abs_max   inout  F32 (1,)      or None; raised to the largest |out|
        fp8       out    Fp8Out        or None; out once more, as FP8 codes

    Cost:    two reads and one write of (rows,C); one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "rmsnorm.post"
    rows, C = expect_rows(op, "x", x)
    expect(op, "out", out, x.dtype, (rows, C))
    expect(op, "rstd", rstd, F32, (rows,))
    if residual is not None:
        expect(op, "residual", residual, x.dtype, (rows, C))
    expect(op, "weight", weight, x.dtype, (C,))
    layout = row_layout(C, x.dtype.itemsize, LANE_VECTORS)
    launch = row_launch(op, dev, layout, rows, C, abs_max=abs_max, fp8=fp8, **FORWARD)
    dev.launch(
        RMSNORM_POST,
        launch.blocks,
        launch.threads,
        (out, rstd, x, residual, weight, eps, rows, C, *launch.args),
        consts=launch.consts,
    )


def backward(
    dev: Device,
    d_x: Tensor,
    d_weight: Accumulator | None,
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    d_residual: Tensor | None,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """Gradients of the norm, with the gradient that reaches x past it added to d_x.

        d_x = T(rstd * (d_out * weight - x_hat * mean(d_out * weight * x_hat)) + d_residual)
        d_weight = or += sum over rows of d_out * x_hat        x_hat = rstd * x

    Args:
        d_x         out    T          (rows,C)  may be d_residual
        d_weight    inout  F32, BF16  (C,)      or None; added to when accumulating
        d_out       in     T          (rows,C)
        x           in     T          (rows,C)  C a multiple of 8, at most 8192
        weight      in     T          (C,)
        rstd        in     F32        (rows,)
        d_residual  in     T          (rows,C)  or None
        abs_max     inout  F32        (1,)      or None; raised to the largest |d_x|
        fp8         out    Fp8Out               or None; d_x once more, as FP8 codes

    Cost:    three reads and one write of (rows,C); two launches; workspace F32 (grid, C).
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "rmsnorm.backward"
    rows, C = expect_rows(op, "x", x)
    expect(op, "d_x", d_x, x.dtype, (rows, C))
    if d_weight is not None:
        expect(op, "d_weight", d_weight.tensor, None, (C,))
    expect(op, "d_out", d_out, x.dtype, (rows, C))
    expect(op, "weight", weight, x.dtype, (C,))
    expect(op, "rstd", rstd, F32, (rows,))
    if d_residual is not None:
        expect(op, "d_residual", d_residual, x.dtype, (rows, C))
    layout = row_layout(C, x.dtype.itemsize, LANE_VECTORS)
    launch = row_launch(op, dev, layout, rows, C, abs_max=abs_max, fp8=fp8, **BACKWARD)
    with dev.scratch("rmsnorm_partial", (launch.blocks, C), F32) as partial:
        dev.launch(
            RMSNORM_BACKWARD,
            launch.blocks,
            launch.threads,
            (d_x, partial, d_out, x, weight, rstd, d_residual, rows, C, *launch.args),
            consts=launch.consts,
        )
        finish_column_sum(dev, RMSNORM_BACKWARD_WEIGHT, d_weight, partial, ANY_ROWS)
