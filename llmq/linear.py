"""A linear layer: out = x @ weight^T + bias, and its three gradients, in the model's format or fp8.

Weights are (out_features, in_features). Activations are (rows, features).

An fp8 tensor has one scale, from its largest absolute value, which the kernel that produced the
tensor has recorded. Ada and Hopper multiply fp8 matrices only with the inner dimension contiguous
in both, so input, weight and output gradient are each needed in two layouts:

    out      = x       (rows, in)  @ weight   (out, in)^T
    d_x      = d_out   (rows, out) @ weight_t (in, out)^T
    d_weight = d_out_t (out, rows) @ x_t      (in, rows)^T
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from llmq.dtypes import F32, DType
from llmq.ops import bias as bias_op
from llmq.ops import quantize, reduce
from llmq.ops.matmul import matmul, matmul_fp8
from llmq.runtime.device import Device
from llmq.runtime.tensor import Accumulator, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Of one tensor that gets quantized: its largest absolute value and its scale, F32 (1,)."""

    abs_max: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """An fp8 tensor: source ~ codes * scale, in the layouts that were asked for.

    codes: (rows, features). transposed: (features, rows). source: what was quantized, None where
    it is gone.
    """

    source: Tensor | None
    codes: Tensor | None
    transposed: Tensor | None
    scale: Tensor


Operand = Tensor | Fp8


def quantized(
    dev: Device,
    temps: ExitStack,
    x: Tensor,
    amount: Amount,
    dtype: DType,
    *,
    codes: bool = True,
    transposed: bool = True,
    transposed_to: Tensor | None = None,
) -> Fp8:
    """x (rows, features) in fp8, in scratch that lives as long as temps.

    transposed_to: where the transposed layout goes instead of to scratch.
    """
    rows, features = x.shape

    def scratch(name: str, *shape: int) -> Tensor:
        return temps.enter_context(dev.scratch(f"{x.name}.{name}", shape, dtype))

    q = scratch("q", rows, features) if codes else None
    q_t = transposed_to
    if transposed and q_t is None:
        q_t = scratch("q_t", features, rows)
    quantize.quantize(dev, q, q_t, amount.scale, x, amount.abs_max)
    return Fp8(source=x, codes=q, transposed=q_t, scale=amount.scale)


def forward(
    dev: Device, out: Tensor, x: Operand, weight: Operand, bias: Tensor | None = None
) -> None:
    """out (rows, out_features) = x (rows, in_features) @ weight^T + bias."""
    if isinstance(weight, Fp8):
        matmul_fp8(dev, out, x.codes, weight.codes, x.scale, weight.scale, bias=bias)
    else:
        matmul(dev, out, x, weight, trans_b=True, bias=bias)


def weight_gradient(dev: Device, d_weight: Accumulator, d_out: Operand, x: Operand) -> None:
    """d_weight (out_features, in_features) = or += d_out^T @ x.

    A BF16 accumulator cannot add inside the product, which would round to nearest every time and
    lose small contributions; it gets the product's BF16 result added with stochastic rounding.
    """
    target = d_weight.tensor
    if target.dtype == F32 or not d_weight.accumulate:
        _weight_product(dev, target, d_out, x, d_weight.accumulate)
        return
    with dev.scratch("d_weight", target.shape, target.dtype) as product:
        _weight_product(dev, product, d_out, x, False)
        reduce.add(dev, d_weight, product)


def _weight_product(dev: Device, out: Tensor, d_out: Operand, x: Operand, accumulate: bool) -> None:
    if isinstance(x, Fp8):
        operands = (d_out.transposed, x.transposed, d_out.scale, x.scale)
        matmul_fp8(dev, out, *operands, accumulate=accumulate)
    else:
        matmul(dev, out, d_out, x, trans_a=True, accumulate=accumulate)


def backward(
    dev: Device,
    d_x: Tensor,
    d_weight: Accumulator,
    d_bias: Accumulator | None,
    d_out: Operand,
    x: Operand,
    weight: Operand,
) -> None:
    """All gradients of the layer, from d_out (rows, out_features) and the input x it had."""
    if isinstance(weight, Fp8):
        matmul_fp8(dev, d_x, d_out.codes, weight.transposed, d_out.scale, weight.scale)
    else:
        matmul(dev, d_x, d_out, weight)
    weight_gradient(dev, d_weight, d_out, x)
    if d_bias is not None:
        bias_op.backward(dev, d_bias, d_out.source if isinstance(d_out, Fp8) else d_out)
