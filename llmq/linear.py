"""A linear layer: out = x @ weight^T + bias, and its three gradients.

Weights are (out_features, in_features). Activations are (rows, features).
"""

from __future__ import annotations

from llmq.dtypes import F32
from llmq.ops import bias as bias_op
from llmq.ops import reduce
from llmq.ops.matmul import matmul
from llmq.runtime.device import Device
from llmq.runtime.tensor import Accumulator, Tensor


def forward(
    dev: Device, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> None:
    """out (rows, out_features) = x (rows, in_features) @ weight^T + bias."""
    matmul(dev, out, x, weight, trans_b=True, bias=bias)


def weight_gradient(dev: Device, d_weight: Accumulator, d_out: Tensor, x: Tensor) -> None:
    """d_weight (out_features, in_features) = or += d_out^T @ x.

    A BF16 accumulator cannot add inside the product, which would round to nearest every time and
    lose small contributions; it gets the product's BF16 result added with stochastic rounding.
    """
    target = d_weight.tensor
    if target.dtype == F32 or not d_weight.accumulate:
        matmul(dev, target, d_out, x, trans_a=True, accumulate=d_weight.accumulate)
        return
    with dev.scratch("d_weight", target.shape, target.dtype) as product:
        matmul(dev, product, d_out, x, trans_a=True)
        reduce.add(dev, d_weight, product)


def backward(
    dev: Device,
    d_x: Tensor,
    d_weight: Accumulator,
    d_bias: Accumulator | None,
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
) -> None:
    """All gradients of the layer, from d_out (rows, out_features) and the input x it had."""
    matmul(dev, d_x, d_out, weight)
    weight_gradient(dev, d_weight, d_out, x)
    if d_bias is not None:
        bias_op.backward(dev, d_bias, d_out)
