"""Linear layers: out = x @ weight^T + bias, and the three gradients, in BF16, F32, int8 or fp8.

Weights are (out_features, in_features). Activations are (rows, features).

An fp8 tensor has one scale. Ada and Hopper multiply fp8 matrices only if the inner dimension is
contiguous in both matrices; input, weight and output gradient therefore need two layouts each:

    out      = x       (rows, in)  @ weight   (out, in)^T
    d_x      = d_out   (rows, out) @ weight_t (in, out)^T
    d_weight = d_out_t (out, rows) @ x_t      (in, rows)^T

Fp8 products may accumulate in fewer bits (`ops.product.matmul.matmul_fp8`).
"""

from llmq.base.operand import Adapters, Operand, tensor_of
from llmq.base.tensor import Accumulator, Tensor
from llmq.formats.operands import BACKWARD, FORWARD, WEIGHT, Operands
from llmq.ops.pointwise import reduce
from llmq.ops.product.product import product, weight_gradient
from llmq.runtime.device import Device


class Linear:
    """Products of the LM head, of routers and of adapters; `BlockLinear` computes the products of
    blocks."""

    def __init__(self, dev: Device, operands: Operands | None = None, alpha: float = 1.0):
        """operands: the maker of operands in a number format; None: products read the tensors.
        alpha: factor of products with the weight in forward and backward, but not of biases."""
        self.dev, self.operands, self.alpha = dev, operands or Operands(dev), alpha

    def forward(
        self, out: Tensor, x: Operand, weight: Operand, *, adapters: Adapters | None = None
    ) -> None:
        """Compute out (rows, out_features) = alpha * x (rows, in_features) @ weight^T + the
        adapters' term."""
        product(
            self.dev, out, x, weight, trans_b=True, adapters=adapters,
            fast=FORWARD in self.operands.fast, alpha=self.alpha,
        )  # fmt: skip

    def input_gradient(self, d_x: Tensor, d_out: Operand, weight: Operand) -> None:
        """Compute d_x (rows, in_features) = alpha * d_out (rows, out_features) @ weight."""
        fast = BACKWARD in self.operands.fast
        product(self.dev, d_x, d_out, weight, fast=fast, alpha=self.alpha)

    def weight_gradients(
        self, d_weight: Accumulator | None, d_bias: Accumulator | None, d_out: Operand, x: Operand
    ) -> None:
        """Compute d_weight (out_features, in_features) = or += alpha * d_out^T @ x, and d_bias
        (out_features,) = or += the sum of d_out's rows. An argument is None for a frozen or missing
        parameter."""
        if d_weight is not None:
            fast = WEIGHT in self.operands.fast
            weight_gradient(self.dev, d_weight, d_out, x, fast=fast, alpha=self.alpha)
        if d_bias is not None:
            reduce.bias_gradient(self.dev, d_bias, tensor_of(d_out))
