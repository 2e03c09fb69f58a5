"""A linear layer: out = x @ weight^T + bias, and its three gradients, in the model's format or fp8.

Weights are (out_features, in_features). Activations are (rows, features).

An fp8 tensor has one scale. Ada and Hopper multiply fp8 matrices only with the inner dimension
contiguous in both, so input, weight and output gradient are each needed in two layouts:

    out      = x       (rows, in)  @ weight   (out, in)^T
    d_x      = d_out   (rows, out) @ weight_t (in, out)^T
    d_weight = d_out_t (out, rows) @ x_t      (in, rows)^T

Fp8 products may be permitted to sum with fewer bits (`ops.matmul.matmul_fp8`).
"""

from __future__ import annotations

from typing import NamedTuple

from llmq.base.dtypes import F32
from llmq.base.operand import Fp8, Operand
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops import bias as bias_op
from llmq.ops import reduce
from llmq.ops.matmul import matmul, matmul_fp8
from llmq.runtime.device import Device


class Fast(NamedTuple):
    """Which fp8 products may sum with fewer bits."""

    forward: bool = False
    d_x: bool = False
    d_weight: bool = False


EXACT = Fast()


def forward(
    dev: Device,
    out: Tensor,
    x: Operand,
    weight: Operand,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
) -> None:
    """out (rows, out_features) = x (rows, in_features) @ weight^T + bias."""
    if isinstance(weight, Fp8):
        scales = (x.scale, weight.scale)
        args = (x.codes, weight.codes, *scales)
        matmul_fp8(dev, out, *args, bias=bias, fast_accumulation=fast)
    else:
        matmul(dev, out, x, weight, trans_b=True, bias=bias)


def input_gradient(
    dev: Device, d_x: Tensor, d_out: Operand, weight: Operand, *, fast: bool = False
) -> None:
    """d_x (rows, in_features) = d_out @ weight."""
    if isinstance(weight, Fp8):
        args = (d_out.codes, weight.transposed, d_out.scale, weight.scale)
        matmul_fp8(dev, d_x, *args, fast_accumulation=fast)
    else:
        matmul(dev, d_x, d_out, weight)


def weight_gradients(
    dev: Device,
    d_weight: Accumulator,
    d_bias: Accumulator | None,
    d_out: Operand,
    x: Operand,
    *,
    fast: bool = False,
) -> None:
    """d_weight (out_features, in_features) = or += d_out^T @ x, d_bias the sum of d_out's rows.

    A BF16 accumulator cannot add inside the product, which would round to nearest every time and
    lose small contributions; it gets the product's BF16 result added with stochastic rounding.
    """
    target = d_weight.tensor
    if target.dtype == F32 or not d_weight.accumulate:
        _weight_product(dev, target, d_out, x, d_weight.accumulate, fast)
    else:
        with dev.scratch("d_weight", target.shape, target.dtype) as product:
            _weight_product(dev, product, d_out, x, False, fast)
            reduce.add(dev, d_weight, product)
    if d_bias is not None:
        bias_op.backward(dev, d_bias, d_out.source if isinstance(d_out, Fp8) else d_out)


def _weight_product(
    dev: Device, out: Tensor, d_out: Operand, x: Operand, accumulate: bool, fast: bool
) -> None:
    if isinstance(x, Fp8):
        args = (d_out.transposed, x.transposed, d_out.scale, x.scale)
        matmul_fp8(dev, out, *args, accumulate=accumulate, fast_accumulation=fast)
    else:
        matmul(dev, out, d_out, x, trans_a=True, accumulate=accumulate)
