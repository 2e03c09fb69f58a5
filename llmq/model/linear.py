"""A linear layer: out = x @ weight^T + bias, and its three gradients, in the model's format or fp8.

Weights are (out_features, in_features). Activations are (rows, features).

An fp8 tensor has one scale. Ada and Hopper multiply fp8 matrices only with the inner dimension
contiguous in both, so input, weight and output gradient are each needed in two layouts:

    out      = x       (rows, in)  @ weight   (out, in)^T
    d_x      = d_out   (rows, out) @ weight_t (in, out)^T
    d_weight = d_out_t (out, rows) @ x_t      (in, rows)^T

Fp8 products may be permitted to sum with fewer bits (`ops.matmul.matmul_fp8`).
"""

from typing import Any

from llmq.base.operand import STORE, Adapters, Epilogue, GradientSum, Operand, tensor_of
from llmq.base.tensor import Accumulator, Tensor
from llmq.formats.format import BACKWARD, FORWARD, WEIGHT, Format
from llmq.ops import reduce
from llmq.ops.product import product
from llmq.runtime.device import Device

_LAID = {FORWARD: {"trans_b": True}, BACKWARD: {}, WEIGHT: {"trans_a": True}}


class Linear:
    """The products of linear layers on one device."""

    def __init__(self, dev: Device, format: Format | None = None):
        """format: of the operands; None: they are tensors that are multiplied as they are."""
        self.dev, self.format = dev, format or Format(dev)

    def how(self, which: str, a: Operand, b: Operand, salt: int = 0) -> dict[str, Any]:
        """The arguments of `product` that make it one of the three. which: FORWARD, BACKWARD or
        WEIGHT. salt: as of `Format.pair`."""
        a, b = self.format.pair(which, a, b, salt)
        return {"a": a, "b": b, "fast": which in self.format.fast, **_LAID[which]}

    def forward(
        self,
        out: Tensor,
        x: Operand,
        weight: Operand,
        bias: Tensor | None = None,
        *,
        epilogue: Epilogue = STORE,
        adapters: Adapters | None = None,
    ) -> None:
        """out (rows, out_features) = x (rows, in_features) @ weight^T + bias + the adapters', and
        the epilogue."""
        terms = {"bias": bias, "adapters": adapters, "epilogue": epilogue}
        product(self.dev, out, **terms, **self.how(FORWARD, x, weight))

    def input_gradient(
        self, d_x: Tensor, d_out: Operand, weight: Operand, *, epilogue: Epilogue = STORE
    ) -> None:
        """d_x (rows, in_features) = d_out (rows, out_features) @ weight, and the epilogue."""
        product(self.dev, d_x, epilogue=epilogue, **self.how(BACKWARD, d_out, weight))

    def weight_gradients(
        self,
        d_weight: Accumulator | None,
        d_bias: Accumulator | None,
        d_out: Operand,
        x: Operand,
        salt: int = 0,
    ) -> None:
        """d_weight (out_features, in_features) = or += d_out^T @ x, d_bias the sum of d_out's rows.
        None: not wanted, because the parameter is frozen or there is none. salt: as in how."""
        if d_weight is not None:
            how = self.how(WEIGHT, d_out, x, salt)
            product(self.dev, d_weight, epilogue=GradientSum(), **how)
        if d_bias is not None:
            reduce.bias_gradient(self.dev, d_bias, tensor_of(d_out))
