"""RMSNorm and LayerNorm over the channels, alone and fused with a residual addition.

Calls with a mean (and a bias) are LayerNorm's, those without are RMSNorm's.
"""

from typing import NamedTuple

from llmq.base.dtypes import BF16, F32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    abs_max_consts,
    expect_accumulator,
    expect_columns,
    expect_float,
    finish_column_sum,
    fp8_args,
    fp8_consts,
    row_layout,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

# The end of the kernels' arguments; _Launch.results are the values.
ROW_ARGS = "inout f32*? abs_max, Q*? codes, const f32*? scale, inout i32*? saturated"
NORM_FORWARD = Kernel(
    "pointwise/norm.cu",
    "norm_forward",
    args="T*? out, f32*? mean, f32* rstd, const T* x, const T* weight, const T*? bias, f32 eps, "
    "i64 rows, i32 C, " + ROW_ARGS,
)
NORM_FORWARD_RESIDUAL = Kernel(
    "pointwise/norm.cu",
    "norm_forward_residual",
    args="T* residual_out, T*? out, f32*? mean, f32* rstd, const T* residual, const T* branch, "
    "const T* weight, const T*? bias, f32 eps, i64 rows, i32 C, " + ROW_ARGS,
)
NORM_POST = Kernel(
    "pointwise/norm.cu",
    "norm_post",
    args="T* out, f32* rstd, const T* x, const T*? residual, const T* weight, f32 eps, i64 rows, "
    "i32 C, " + ROW_ARGS,
)
NORM_BACKWARD = Kernel(
    "pointwise/norm.cu",
    "norm_backward",
    args="T* d_x, f32*? partial, const T* d_out, const T* x, const T* weight, const f32*? mean, "
    "const f32* rstd, const T*? d_residual, i64 rows, i32 C, " + ROW_ARGS,
)

# As many as the backward kernels have registers for, SM_WARPS on an SM.
RMS_LANE_VECTORS, LAYER_LANE_VECTORS = {BF16: 4, F32: 4}, {BF16: 3, F32: 4}
# Forward: far more blocks than run at a time, so that loads of new ones fill the gaps of old ones.
# BF16 on an H100, in shares of a copy's bandwidth: RMSNorm of (32768, 896) 92 %, 80 % with 8
# blocks; LayerNorm of (32768, 768) 84 %, 73 % with 8 blocks.
FORWARD_BLOCKS = 64
SM_WARPS = 16  # of backward: as many as there are registers for
CROWDED_SM_WARPS = 12  # the same with codes, where a lane has as many vectors as it may have
BLOCK_WARPS = 4  # at least; of more of them, more would wait for the slowest


def forward(
    dev: Device,
    out: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    offset: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """out = the norm of x.

        RMSNorm    rstd = 1 / sqrt(mean(x^2) + eps)      out = T(T(rstd * x) * weight), as in HF
                   with offset                           out = T(rstd * x * (1 + weight))
        LayerNorm  rstd = 1 / sqrt(variance(x) + eps)    out = T((x - mean) * rstd * weight + bias)

    With offset it rounds as HF's Gemma3 does; only RMSNorm has one.

    Args:
        out      out    T   (rows,C)  F32 or BF16; or None where fp8 is all that is wanted
        mean     out    F32 (rows,)   of LayerNorm; None makes it RMSNorm
        rstd     out    F32 (rows,)
        x        in     T   (rows,C)  C a multiple of 8, at most 8192 (on a GPU)
        weight   in     T   (C,)
        bias     in     T   (C,)      of LayerNorm; else None
        abs_max  inout  F32 (1,)      or None; raised to the largest |out|
        fp8      out    Fp8Out        or None; out once more, as FP8 codes
    """
    op = "norm.forward"
    alike = {} if out is None and fp8 is not None else {"out": out}
    rows, C = _check(op, dev, "x", x, alike, mean, rstd, weight)
    _check_bias(op, mean, bias, x)
    launch = _launch(op, dev, x, mean, abs_max, fp8, offset)
    args = (out, mean, rstd, x, weight, bias, eps, rows, C)
    consts, args = launch.consts_for(writes_out=out is not None), (*args, *launch.results)
    dev.launch(NORM_FORWARD, launch.blocks, launch.threads, args, consts=consts)


def forward_residual(
    dev: Device,
    residual_out: Tensor,
    out: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    offset: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """residual_out = T(residual + branch); out, mean and rstd = norm of the rounded sum.

    Args as forward, without x, and
        residual_out  out  T (rows,C)  may be residual
        residual      in   T (rows,C)  C a multiple of 8, at most 8192 (on a GPU)
        branch        in   T (rows,C)
    """
    op = "norm.forward_residual"
    alike = {"residual_out": residual_out, "branch": branch}
    alike |= {} if out is None and fp8 is not None else {"out": out}
    rows, C = _check(op, dev, "residual", residual, alike, mean, rstd, weight)
    _check_bias(op, mean, bias, residual)
    launch = _launch(op, dev, residual, mean, abs_max, fp8, offset)
    args = (residual_out, out, mean, rstd, residual, branch, weight, bias, eps, rows, C)
    consts, args = launch.consts_for(writes_out=out is not None), (*args, *launch.results)
    dev.launch(NORM_FORWARD_RESIDUAL, launch.blocks, launch.threads, args, consts=consts)


def post(
    dev: Device,
    out: Tensor,
    rstd: Tensor,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    offset: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """out = T(residual + T(rstd * x * weight)), or without the sum; rounds as HF's Olmo2 does.

    Offset as in forward. Its backward pass is `backward` without d_residual: the residual's
    gradient is out's.

    Args as forward of an RMSNorm, and
        out       out  T (rows,C)  F32 or BF16; never None; may be residual
        residual  in   T (rows,C)  or None
    """
    op = "norm.post"
    alike = {"out": out} | ({} if residual is None else {"residual": residual})
    rows, C = _check(op, dev, "x", x, alike, None, rstd, weight)
    launch = _launch(op, dev, x, None, abs_max, fp8, offset)
    args = (out, rstd, x, residual, weight, eps, rows, C, *launch.results)
    dev.launch(NORM_POST, launch.blocks, launch.threads, args, consts=launch.consts_for())


def backward(
    dev: Device,
    d_x: Tensor,
    d_weight: Accumulator | None,
    d_bias: Accumulator | None,
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    d_residual: Tensor | None,
    *,
    offset: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """Gradients of the norm, with the gradient that reaches x past it added to d_x.

        d_norm = d_out * weight        x_hat = (x - mean) * rstd, or x * rstd in RMSNorm
        d_x = T(rstd * (d_norm - mean(d_norm) - x_hat * mean(d_norm * x_hat)) + d_residual),
              without mean(d_norm) in RMSNorm
        d_weight = or += sum over rows of d_out * x_hat        d_bias = or += of d_out
        offset: 1 + weight in place of weight

    Args:
        d_x         out    T          (rows,C)  may be d_residual
        d_weight    inout  F32, BF16  (C,)      or None; added to when accumulating
        d_bias      inout  F32, BF16  (C,)      or None, as in every RMSNorm
        d_out       in     T          (rows,C)
        x           in     T          (rows,C)  C a multiple of 8, at most 8192 (on a GPU)
        weight      in     T          (C,)
        mean        in     F32        (rows,)   of LayerNorm; None makes it RMSNorm
        rstd        in     F32        (rows,)
        d_residual  in     T          (rows,C)  or None
        abs_max     inout  F32        (1,)      or None; raised to the largest |d_x|
        fp8         out    Fp8Out               or None; d_x once more, as FP8 codes

    Cost:    three reads and one write of (rows,C); one launch, and one for each gradient of a
             parameter; if there is any, workspace F32 (grid, C), of LayerNorm (2, grid, C).
    """
    op = "norm.backward"
    alike = {"d_x": d_x, "d_out": d_out}
    alike |= {} if d_residual is None else {"d_residual": d_residual}
    rows, C = _check(op, dev, "x", x, alike, mean, rstd, weight)
    if d_bias is not None and mean is None:
        raise TypeError(f"{op}: d_bias must be None without mean, got {d_bias.tensor!r}")
    expect_accumulator(op, "d_weight", d_weight, (C,))
    expect_accumulator(op, "d_bias", d_bias, (C,))
    launch = _launch(op, dev, x, mean, abs_max, fp8, offset, backward=True)
    targets = (d_weight,) if mean is None else (d_weight, d_bias)
    rest = (d_out, x, weight, mean, rstd, d_residual, rows, C)
    if not any(targets):
        args, consts = (d_x, None, *rest, *launch.results), launch.consts_for(writes_sums=False)
        dev.launch(NORM_BACKWARD, launch.blocks, launch.threads, args, consts=consts)
        return
    with dev.scratch("norm_partial", (len(targets), launch.blocks, C), F32) as partial:
        args, consts = (d_x, partial, *rest, *launch.results), launch.consts_for()
        dev.launch(NORM_BACKWARD, launch.blocks, launch.threads, args, consts=consts)
        for i, target in enumerate(targets):
            finish_column_sum(dev, target, partial.rows(i, i + 1).view(launch.blocks, C))


def _check(
    op: str,
    dev: Device,
    name: str,
    x: Tensor,
    alike: dict[str, Tensor],
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
) -> tuple[int, int]:
    """(rows, C) of x, the argument of this name. alike: what has its dtype and shape, by name."""
    expect_float(op, name, x)
    if len(x.shape) != 2:
        raise ValueError(f"{op}: {name} must have shape (rows, C), got {x.shape}")
    rows, C = x.shape
    expect_columns(op, dev, "C", C)
    for other, tensor in alike.items():
        expect(op, other, tensor, x.dtype, (rows, C))
    if mean is not None:
        expect(op, "mean", mean, F32, (rows,))
    expect(op, "rstd", rstd, F32, (rows,))
    expect(op, "weight", weight, x.dtype, (C,))
    return rows, C


def _check_bias(op: str, mean: Tensor | None, bias: Tensor | None, x: Tensor) -> None:
    if mean is not None:
        expect(op, "bias", bias, x.dtype, x.shape[1:])
    elif bias is not None:
        raise TypeError(f"{op}: bias must be None without mean, got {bias!r}")


class _Launch(NamedTuple):
    """How a kernel whose blocks hold whole rows is launched, and the end of its arguments."""

    blocks: int
    threads: int
    consts: dict[str, int]
    results: tuple[Tensor | None, ...]

    def consts_for(self, *, writes_out: bool = True, writes_sums: bool = True) -> dict[str, int]:
        """The constants of a kernel that writes these of its results."""
        return self.consts | {"OUT": int(writes_out), "SUMS": int(writes_sums)}


def _launch(
    op: str,
    dev: Device,
    x: Tensor,
    mean: Tensor | None,
    abs_max: Tensor | None,
    fp8: Fp8Out | None,
    offset: bool,
    *,
    backward: bool = False,
) -> _Launch:
    """Launch over the rows of x, for results of its shape. Codes are written row by row only: a
    block would hold too few rows to transpose them, and write a feature's neighbouring bytes in
    pieces of less than memory's 32. Raises TypeError or ValueError if abs_max or fp8 does not fit,
    or offset LayerNorm."""
    if mean is not None and offset:
        raise TypeError(f"{op}: offset must be False with mean")
    rows, C = x.shape
    lane_vectors = RMS_LANE_VECTORS if mean is None else LAYER_LANE_VECTORS
    layout = row_layout(C, x.dtype.itemsize, lane_vectors[x.dtype])
    consts = layout.consts | abs_max_consts(op, abs_max)
    consts |= {"CENTRED": int(mean is not None), "CODES": int(fp8 is not None)}
    consts["OFFSET"] = int(offset)
    fp8_consts(op, fp8, rows, C)
    if fp8 is not None and fp8.transposed is not None:
        raise TypeError(f"{op}: fp8.transposed must be None, only fp8.codes is written")
    on_sm = FORWARD_BLOCKS
    if backward:
        crowded = fp8 is not None and layout.vectors >= lane_vectors[BF16]
        on_sm = (CROWDED_SM_WARPS if crowded else SM_WARPS) // max(layout.warps, BLOCK_WARPS)
    grid = layout.launch(rows, BLOCK_WARPS, max(on_sm, 1) * dev.num_sms)
    codes, _, scale, saturated = fp8_args(fp8)
    return _Launch(*grid, consts, (abs_max, codes, scale, saturated))
