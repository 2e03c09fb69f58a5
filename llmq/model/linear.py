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

from llmq.base.dtypes import DType
from llmq.base.epilogue import STORE, Adapters, Epilogue, GradientSum, Handed
from llmq.base.operand import Fp8, Operand, Result
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


FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"
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

    def multiply(self, a: Operand, b: Operand, operands: str, salt: int) -> Multiply | None:
        """How products are computed in a format that only this class knows; None: in no such one.

        operands: FORWARD, BACKWARD or WEIGHT. salt: of input_gradient and weight_gradients.
        """
        return None

    def forward(
        self,
        out: Result | Handed,
        x: Operand,
        weight: Operand,
        bias: Tensor | None = None,
        *,
        adapters: Adapters | None = None,
        addend: Tensor | None = None,
        epilogue: Epilogue = STORE,
    ) -> None:
        """out (rows, out_features) = x (rows, in_features) @ weight^T + bias, and the rest."""
        product(
            self.dev, out, x, weight, trans_b=True, adapters=adapters, bias=bias, addend=addend,
            epilogue=epilogue, fast=self.fast.forward,
            multiply=self.multiply(x, weight, FORWARD, 0),
        )  # fmt: skip

    def input_gradient(
        self,
        d_x: Result | Handed,
        d_out: Operand,
        weight: Operand,
        salt: int = 0,
        *,
        adapters: Adapters | None = None,
        epilogue: Epilogue = STORE,
    ) -> None:
        """d_x (rows, in_features) = d_out (rows, out_features) @ weight, and the rest.

        salt: a number of this weight's own, for products that round their operands stochastically.
        """
        product(
            self.dev, d_x, d_out, weight, adapters=adapters, epilogue=epilogue, fast=self.fast.d_x,
            multiply=self.multiply(d_out, weight, BACKWARD, salt),
        )  # fmt: skip

    def weight_gradients(
        self,
        d_weight: Accumulator | None,
        d_bias: Accumulator | None,
        d_out: Operand,
        x: Operand,
        salt: int = 0,
    ) -> None:
        """d_weight (out_features, in_features) = or += d_out^T @ x, d_bias the sum of d_out's rows.

        None: not wanted, because the parameter is frozen or there is none. salt: as in
        input_gradient.
        """
        if d_weight is not None:
            product(
                self.dev, d_weight, d_out, x, trans_a=True, epilogue=GradientSum(),
                fast=self.fast.d_weight, multiply=self.multiply(d_out, x, WEIGHT, salt),
            )  # fmt: skip
        if d_bias is not None:
            source = d_out.source if isinstance(d_out, Fp8) else d_out
            bias_op.backward(self.dev, d_bias, source)
