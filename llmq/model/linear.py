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

from typing import Any, NamedTuple

from llmq.base.dtypes import DType
from llmq.base.epilogue import STORE, Epilogue, GradientSum
from llmq.base.operand import Fp8, Operand
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops import bias as bias_op
from llmq.ops.product import Multiply, product, takes_addend
from llmq.runtime.device import Device


class Fast(NamedTuple):
    """Which fp8 products may sum with fewer bits."""

    forward: bool = False
    d_x: bool = False
    d_weight: bool = False


class FastProducts(NamedTuple):
    blocks: Fast
    head: Fast


FORWARD, BACKWARD, WEIGHT = Fast._fields
"""The three products of a layer: of its output, of its input's gradient and of its weight's."""
_LAID = {FORWARD: {"trans_b": True}, BACKWARD: {}, WEIGHT: {"trans_a": True}}
EXACT = Fast()
# By --fp8-fast-accumulation. What is lost grows with the length of the sums: over features in most
# products, over tokens in weights' gradients, and over the vocabulary in the gradient of the head's
# input.
FAST = {
    "none": FastProducts(EXACT, EXACT),
    "forward": FastProducts(Fast(forward=True), Fast(forward=True)),
    "activations": FastProducts(Fast(forward=True, d_x=True), Fast(forward=True)),
    "all": FastProducts(*[Fast(forward=True, d_x=True, d_weight=True)] * 2),
}


class Linear:
    """The products of linear layers on one device."""

    def __init__(self, dev: Device, fast: Fast = EXACT):
        self.dev, self.fast = dev, fast

    def takes_addend(self, out: Tensor, dtype: DType, features: int, hidden: Tensor | None) -> bool:
        """Whether forward takes an addend for an `out` like this one.

        dtype, features: of x, as products multiply it. hidden: of adapters; None: there are none.
        """
        return takes_addend(self.dev, out, dtype, features, hidden, fast=self.fast.forward)

    def multiply(self, which: str, a: Operand, b: Operand, salt: int) -> Multiply | None:
        """How a product is computed in a format that only this class knows; None: in no such one.

        which: FORWARD, BACKWARD or WEIGHT. a, b: as `product` takes them there. salt: as in how.
        """
        return None

    def how(self, which: str, a: Operand, b: Operand, salt: int = 0) -> dict[str, Any]:
        """The arguments of `product` that make it one of the three; a, b: as in multiply.

        salt: a number of this weight's own, for products that round their operands stochastically.
        """
        fast, multiply = getattr(self.fast, which), self.multiply(which, a, b, salt)
        return {**_LAID[which], "fast": fast, "multiply": multiply}

    def forward(
        self,
        out: Tensor,
        x: Operand,
        weight: Operand,
        bias: Tensor | None = None,
        *,
        epilogue: Epilogue = STORE,
    ) -> None:
        """out (rows, out_features) = x (rows, in_features) @ weight^T + bias, and the epilogue."""
        how = self.how(FORWARD, x, weight)
        product(self.dev, out, x, weight, bias=bias, epilogue=epilogue, **how)

    def input_gradient(
        self, d_x: Tensor, d_out: Operand, weight: Operand, *, epilogue: Epilogue = STORE
    ) -> None:
        """d_x (rows, in_features) = d_out (rows, out_features) @ weight, and the epilogue."""
        how = self.how(BACKWARD, d_out, weight)
        product(self.dev, d_x, d_out, weight, epilogue=epilogue, **how)

    def weight_gradients(
        self,
        d_weight: Accumulator | None,
        d_bias: Accumulator | None,
        d_out: Operand,
        x: Operand,
        salt: int = 0,
    ) -> None:
        """d_weight (out_features, in_features) = or += d_out^T @ x, d_bias the sum of d_out's rows.

        None: not wanted, because the parameter is frozen or there is none. salt: as in how.
        """
        if d_weight is not None:
            how = self.how(WEIGHT, d_out, x, salt)
            product(self.dev, d_weight, d_out, x, epilogue=GradientSum(), **how)
        if d_bias is not None:
            source = d_out.source if isinstance(d_out, Fp8) else d_out
            bias_op.backward(self.dev, d_bias, source)
