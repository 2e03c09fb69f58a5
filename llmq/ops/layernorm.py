"""LayerNorm over the channels, alone and fused with the residual addition before it."""

from __future__ import annotations

from llmq.base.dtypes import BF16, F32
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

LAYERNORM_FORWARD = Kernel(
    "layernorm.cu",
    "layernorm_forward",
    args="T*? out, f32* mean, f32* rstd, const T* x, const T* weight, const T* bias, f32 eps, "
    "i64 rows, i32 C, " + ROW_ARGS,
)
LAYERNORM_FORWARD_RESIDUAL = Kernel(
    "layernorm.cu",
    "layernorm_forward_residual",
    args="T* residual_out, T*? out, f32* mean, f32* rstd, const T* residual, const T* branch, "
    "const T* weight, const T* bias, f32 eps, i64 rows, i32 C, " + ROW_ARGS,
)
LAYERNORM_BACKWARD = Kernel(
    "layernorm.cu",
    "layernorm_backward",
    args="T* d_x, f32* partial, const T* d_out, const T* x, const T* weight, const f32* mean, "
    "const f32* rstd, const T*? d_residual, i64 rows, i32 C, " + ROW_ARGS,
)
LAYERNORM_BACKWARD_PARAMETER = Kernel(
    "layernorm.cu",
    "layernorm_backward_parameter",
    args="inout G* d_parameter, const f32* partial, const i32* scalars, i32 num_partials, i32 C, "
    "i32 accumulate, u32 salt",
)

LANE_VECTORS = {
    BF16: 3,
    F32: 4,
}  # as many as the backward kernel has registers for, two blocks on an SM
# Forward: far more blocks than run at a time, so that loads of new ones fill the gaps of old ones.
# (32768, 768) BF16 on an H100: 84 % of a copy's bandwidth, 73 % with 8 blocks.
FORWARD = {"block_warps": FORWARD_WARPS, "blocks_per_sm": 64}
BACKWARD = {"block_warps": BACKWARD_WARPS, "blocks_per_sm": 2}


def forward(
    dev: Device,
    out: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """out = T((x - mean) * rstd * weight + bias), rstd = 1 / sqrt(variance(x) + eps).

    Args:
        out      out    T   (rows,C)  F32 or BF16; or None where fp8 is all that is wanted
        mean     out    F32 (rows,)
        rstd     out    F32 (rows,)
        x        in     T   (rows,C)  C a multiple of 8, at most 8192
        weight   in     T   (C,)
        bias     in     T   (C,)
        abs_max  inout  F32 (1,)      or None; raised to the largest |out|
        fp8      out    Fp8Out        or None; out once more, as FP8 codes

    Cost:    x read once, out written once; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "layernorm.forward"
    rows, C = expect_rows(op, "x", x)
    consts = out_consts(op, out, x.dtype, (rows, C), fp8)
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        expect(op, name, tensor, F32, (rows,))
    for name, tensor in (("weight", weight), ("bias", bias)):
        expect(op, name, tensor, x.dtype, (C,))
    layout = row_layout(C, x.dtype.itemsize, LANE_VECTORS[x.dtype])
    launch = row_launch(op, dev, layout, rows, C, abs_max=abs_max, fp8=fp8, **FORWARD)
    dev.launch(
        LAYERNORM_FORWARD,
        launch.blocks,
        launch.threads,
        (out, mean, rstd, x, weight, bias, eps, rows, C, *launch.args),
        consts=launch.consts | consts,
    )


def forward_residual(
    dev: Device,
    residual_out: Tensor,
    out: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """residual_out = T(residual + branch); out, mean, rstd = LayerNorm of the rounded sum.

    Args:
        residual_out  out    T   (rows,C)  may be residual
        out           out    T   (rows,C)  F32 or BF16; or None with fp8
        mean          out    F32 (rows,)
        rstd          out    F32 (rows,)
        residual      in     T   (rows,C)  C a multiple of 8, at most 8192
        branch        in     T   (rows,C)
        weight        in     T   (C,)
        bias          in     T   (C,)
        abs_max       inout  F32 (1,)      or None; raised to the largest |out|
        fp8           out    Fp8Out        or None; out once more, as FP8 codes

    Cost:    two reads and two writes of (rows,C); one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "layernorm.forward_residual"
    rows, C = expect_rows(op, "residual", residual)
    consts = out_consts(op, out, residual.dtype, (rows, C), fp8)
    for name, tensor in (("residual_out", residual_out), ("branch", branch)):
        expect(op, name, tensor, residual.dtype, (rows, C))
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        expect(op, name, tensor, F32, (rows,))
    for name, tensor in (("weight", weight), ("bias", bias)):
        expect(op, name, tensor, residual.dtype, (C,))
    layout = row_layout(C, residual.dtype.itemsize, LANE_VECTORS[residual.dtype])
    launch = row_launch(op, dev, layout, rows, C, abs_max=abs_max, fp8=fp8, **FORWARD)
    dev.launch(
        LAYERNORM_FORWARD_RESIDUAL,
        launch.blocks,
        launch.threads,
        (residual_out, out, mean, rstd, residual, branch, weight, bias, eps, rows, C, *launch.args),
        consts=launch.consts | consts,
    )


def backward(
    dev: Device,
    d_x: Tensor,
    d_weight: Accumulator | None,
    d_bias: Accumulator | None,
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    d_residual: Tensor | None,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """Gradients of the norm, with the gradient that reaches x past it added to d_x.

        d_norm = d_out * weight        x_hat = (x - mean) * rstd
        d_x = T(rstd * (d_norm - mean(d_norm) - x_hat * mean(d_norm * x_hat)) + d_residual)
        d_weight = or += sum over rows of d_out * x_hat        d_bias = or += of d_out

    Args:
        d_x         out    T          (rows,C)  may be d_residual
        d_weight, d_bias  inout  F32, BF16  (C,)  or None; added to when accumulating
        d_out       in     T          (rows,C)
        x           in     T          (rows,C)  C a multiple of 8, at most 8192
        weight      in     T          (C,)
        mean, rstd  in     F32        (rows,)
        d_residual  in     T          (rows,C)  or None
        abs_max     inout  F32        (1,)      or None; raised to the largest |d_x|
        fp8         out    Fp8Out               or None; d_x once more, as FP8 codes

    Cost:    three reads and one write of (rows,C); three launches; workspace F32 (2, grid, C).
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "layernorm.backward"
    rows, C = expect_rows(op, "x", x)
    for name, tensor in (("d_x", d_x), ("d_out", d_out)):
        expect(op, name, tensor, x.dtype, (rows, C))
    for name, target in (("d_weight", d_weight), ("d_bias", d_bias)):
        if target is not None:
            expect(op, name, target.tensor, None, (C,))
    expect(op, "weight", weight, x.dtype, (C,))
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        expect(op, name, tensor, F32, (rows,))
    if d_residual is not None:
        expect(op, "d_residual", d_residual, x.dtype, (rows, C))
    layout = row_layout(C, x.dtype.itemsize, LANE_VECTORS[x.dtype])
    launch = row_launch(op, dev, layout, rows, C, abs_max=abs_max, fp8=fp8, **BACKWARD)
    with dev.scratch("layernorm_partial", (2, launch.blocks, C), F32) as partial:
        dev.launch(
            LAYERNORM_BACKWARD,
            launch.blocks,
            launch.threads,
            (d_x, partial, d_out, x, weight, mean, rstd, d_residual, rows, C, *launch.args),
            consts=launch.consts,
        )
        for i, target in enumerate((d_weight, d_bias)):
            sums = partial.rows(i, i + 1).view(launch.blocks, C)
            finish_column_sum(dev, LAYERNORM_BACKWARD_PARAMETER, target, sums, ANY_ROWS)
