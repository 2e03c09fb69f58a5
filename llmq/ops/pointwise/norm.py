"""RMSNorm and LayerNorm over the channels, alone and fused with a residual addition.

A call with mean and bias computes LayerNorm; a call without computes RMSNorm.
"""

from typing import NamedTuple

from llmq.base.dtypes import BF16, F32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    MAX_COLUMNS,
    abs_max_consts,
    finish_column_sum,
    fp8_args,
    fp8_consts,
    row_layout,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel

# Declaration of the kernels' last arguments; _Launch.results has the values.
ROW_ARGS = "inout f32[1]? abs_max, out Q[rows,C]? codes, f32[1]? scale, inout i32[1]? saturated"
ROW_LIMITS = f"C % 8, C <= {MAX_COLUMNS}"
NORM_FORWARD = Kernel(
    "pointwise/norm.cu",
    "norm_forward",
    "out T[rows,C]? out, out f32[rows]? mean, out f32[rows] rstd, T[rows,C] x, T[C] weight, "
    f"T[C]? bias, f32 eps, i64 rows, i32 C, {ROW_ARGS}",
    gpu=ROW_LIMITS,
    programmatic=True,
)
NORM_FORWARD_RESIDUAL = Kernel(
    "pointwise/norm.cu",
    "norm_forward_residual",
    "out T[rows,C] residual_out, out T[rows,C]? out, out f32[rows]? mean, out f32[rows] rstd, "
    "T[rows,C] residual, T[rows,C] branch, T[C] weight, T[C]? bias, f32 eps, i64 rows, i32 C, "
    + ROW_ARGS,
    gpu=ROW_LIMITS,
    programmatic=True,
)
NORM_POST = Kernel(
    "pointwise/norm.cu",
    "norm_post",
    "out T[rows,C]? out, out f32[rows] rstd, T[rows,C] x, T[rows,C]? residual, T[C] weight, "
    f"f32 eps, i64 rows, i32 C, {ROW_ARGS}",
    gpu=ROW_LIMITS,
    programmatic=True,
)
NORM_BACKWARD = Kernel(
    "pointwise/norm.cu",
    "norm_backward",
    "out T[rows,C] d_x, out f32[sums,blocks,C]? partial, T[rows,C] d_out, T[rows,C] x, "
    "T[C] weight, f32[rows]? mean, f32[rows] rstd, T[rows,C]? d_residual, i64 rows, i32 C, "
    + ROW_ARGS,
    gpu=ROW_LIMITS,
)

# Most vectors of a lane: backward kernels have no more registers with SM_WARPS warps per SM.
RMS_LANE_VECTORS, LAYER_LANE_VECTORS = {BF16: 4, F32: 4}, {BF16: 3, F32: 4}
# Forward has more blocks per SM than run at once, so that loads of new blocks overlap old blocks.
# BF16 on an H100, in shares of a copy's bandwidth: RMSNorm of (32768, 896) 92 %, 80 % with 8
# blocks; LayerNorm of (32768, 768) 84 %, 73 % with 8 blocks.
FORWARD_BLOCKS = 64
SM_WARPS = 16  # warps per SM in backward, limited by registers
CROWDED_SM_WARPS = 12  # warps per SM in backward with codes and the most vectors in a lane
BLOCK_WARPS = 4  # least warps of a block; in larger blocks more warps wait for the slowest warp


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
    once: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """out = the norm of x.

        RMSNorm    rstd = 1 / sqrt(mean(x^2) + eps)      out = T(T(rstd * x) * weight), as in HF
                   with offset                           out = T(rstd * x * (1 + weight))
        LayerNorm  rstd = 1 / sqrt(variance(x) + eps)    out = T((x - mean) * rstd * weight + bias)

    offset: for RMSNorm only; rounds as HF's Gemma3. once: rounds as with offset, but multiplies by
    weight. mean, bias: for LayerNorm only. out: may be None with fp8. fp8: gets out in FP8, not
    transposed. abs_max: raised to the largest |out|.
    """
    op = "norm.forward"
    _check(op, mean, bias, out, fp8)
    rows, C = NORM_FORWARD.dims(x=x)
    launch = _launch(op, dev, x, mean, abs_max, fp8, offset)
    args = (out, mean, rstd, x, weight, bias, eps, rows, C)
    consts, args = launch.consts_for(writes_out=out is not None), (*args, *launch.results)
    consts |= {"ROUND_ONCE": 1} if once else {}
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
    once: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """residual_out = T(residual + branch), followed by `forward` of x = residual_out.

    residual_out: may be residual. Other arguments: see forward.
    """
    op = "norm.forward_residual"
    _check(op, mean, bias, out, fp8)
    rows, C = NORM_FORWARD_RESIDUAL.dims(residual=residual)
    launch = _launch(op, dev, residual, mean, abs_max, fp8, offset)
    args = (residual_out, out, mean, rstd, residual, branch, weight, bias, eps, rows, C)
    consts, args = launch.consts_for(writes_out=out is not None), (*args, *launch.results)
    consts |= {"ROUND_ONCE": 1} if once else {}
    dev.launch(NORM_FORWARD_RESIDUAL, launch.blocks, launch.threads, args, consts=consts)


def post(
    dev: Device,
    out: Tensor | None,
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
    """out = T(residual + T(rstd * x * weight)), rounded as in HF's Olmo2.

    `backward` without d_residual gives the gradient of x; the gradient of the residual is d_out.

    residual: None: nothing is added. offset, abs_max, fp8: see forward. out: may be residual.
    """
    _check("norm.post", None, None, out, fp8)
    rows, C = NORM_POST.dims(x=x)
    launch = _launch("norm.post", dev, x, None, abs_max, fp8, offset)
    args = (out, rstd, x, residual, weight, eps, rows, C, *launch.results)
    consts = launch.consts_for(writes_out=out is not None)
    dev.launch(NORM_POST, launch.blocks, launch.threads, args, consts=consts)


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
    """Gradients of the norm. d_residual, x's gradient from other readers than the norm, is added.

        d_norm = d_out * weight        x_hat = (x - mean) * rstd, or x * rstd in RMSNorm
        d_x = T(rstd * (d_norm - mean(d_norm) - x_hat * mean(d_norm * x_hat)) + d_residual),
              without mean(d_norm) in RMSNorm
        d_weight = or += sum over rows of d_out * x_hat        d_bias = or += of d_out
        offset: 1 + weight in place of weight

    d_x: may be d_residual. mean, d_bias: for LayerNorm only. fp8: gets d_x in FP8, beside d_x, not
    transposed. abs_max: raised to the largest |d_x|.

    Cost:    three reads and one write of (rows,C); one launch, and one for each parameter's
             gradient, with F32 (blocks, C) of workspace each.
    """
    op = "norm.backward"
    rows, C = NORM_BACKWARD.dims(x=x)
    if d_bias is not None and mean is None:
        raise TypeError(f"{op}: d_bias must be None without mean, got {d_bias.tensor!r}")
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
    op: str, mean: Tensor | None, bias: Tensor | None, out: Tensor | None, fp8: Fp8Out | None
) -> None:
    if (bias is None) != (mean is None):
        raise TypeError(f"{op}: mean and bias are given together, or none: {mean!r}, {bias!r}")
    if out is None and fp8 is None:
        raise TypeError(f"{op}: out or fp8 must be given, both are None")


class _Launch(NamedTuple):
    """Grid, compile-time constants and last arguments of a kernel whose blocks hold whole rows."""

    blocks: int
    threads: int
    consts: dict[str, int]
    results: tuple[Tensor | None, ...]

    def consts_for(self, *, writes_out: bool = True, writes_sums: bool = True) -> dict[str, int]:
        """Compile-time constants of a kernel that writes these results."""
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
    """Launch over the rows of x, with results of x's shape. TypeError for an offset in LayerNorm,
    and for transposed codes, which blocks of few rows would write in pieces below 32 bytes."""
    if mean is not None and offset:
        raise TypeError(f"{op}: offset must be False with mean")
    rows, C = x.shape
    lane_vectors = RMS_LANE_VECTORS if mean is None else LAYER_LANE_VECTORS
    layout = row_layout(C, x.dtype.itemsize, lane_vectors[x.dtype])
    consts = layout.consts | abs_max_consts(abs_max)
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
