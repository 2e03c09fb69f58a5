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
from llmq.ops import matmul_adapted, reduce
from llmq.ops.matmul import matmul, matmul_fp8
from llmq.runtime.device import Device


class Fast(NamedTuple):
    """Which fp8 products may sum with fewer bits."""

    forward: bool = False
    d_x: bool = False
    d_weight: bool = False


class FastProducts(NamedTuple):
    blocks: Fast
    head: Fast


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

    adapts = True  # whether a product may have the adapters' in it, where that is faster
    adds = True  # whether forward takes an addend, and both ways accumulate

    def __init__(self, dev: Device, fast: Fast = EXACT):
        self.dev, self.fast = dev, fast

    def joins(
        self, out: Tensor, x: Operand, weight: Operand, h: Tensor, *, backward: bool = False
    ) -> bool:
        """Whether `adapted` is the way to compute out with the adapters' part; its arguments."""
        fp8 = isinstance(weight, Fp8)
        fast = self.fast.d_x if backward else self.fast.forward
        if not self.adapts or (fp8 and not fast):
            return False
        return matmul_adapted.is_faster(self.dev, out, x.codes if fp8 else x, h)

    def adapted(
        self,
        out: Tensor,
        x: Operand,
        weight: Operand,
        h: Tensor,
        tail: Tensor,
        *,
        bias: Tensor | None = None,
        backward: bool = False,
    ) -> None:
        """out = x @ weight^T + h @ tail^T + bias, rounded once; backward: x @ weight + h @ tail.

        Args:
            out, x  (rows, out_features), (rows, in_features); backward: the other way round
            h       (rows, R)
            tail    (out_features, R), B; backward: (R, in_features), A
        """
        operands: tuple[Tensor, ...] = (x, weight, h, tail)
        if isinstance(weight, Fp8):
            codes = weight.transposed if backward else weight.codes
            operands = (x.codes, codes, h, tail, x.scale, weight.scale)
        matmul_adapted.matmul_adapted(self.dev, out, *operands, bias=bias, transposed=backward)

    def forward(
        self,
        out: Tensor,
        x: Operand,
        weight: Operand,
        bias: Tensor | None = None,
        *,
        addend: Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        """out (rows, out_features) = x (rows, in_features) @ weight^T + bias, + addend like out.

        accumulate: out is added, too; not with addend.
        """
        if isinstance(weight, Fp8):
            matmul_fp8(
                self.dev, out, x.codes, weight.codes, x.scale, weight.scale, bias=bias,
                addend=addend, accumulate=accumulate, fast_accumulation=self.fast.forward,
            )  # fmt: skip
        else:
            added = {"bias": bias, "addend": addend, "accumulate": accumulate}
            matmul(self.dev, out, x, weight, trans_b=True, **added)

    def input_gradient(
        self,
        d_x: Tensor,
        d_out: Operand,
        weight: Operand,
        salt: int = 0,
        *,
        accumulate: bool = False,
    ) -> None:
        """d_x (rows, in_features) = or += d_out (rows, out_features) @ weight.

        salt: a number of this weight's own, for products that round their operands stochastically.
        """
        if isinstance(weight, Fp8):
            matmul_fp8(
                self.dev, d_x, d_out.codes, weight.transposed, d_out.scale, weight.scale,
                accumulate=accumulate, fast_accumulation=self.fast.d_x,
            )  # fmt: skip
        else:
            matmul(self.dev, d_x, d_out, weight, accumulate=accumulate)

    def weight_gradients(
        self,
        d_weight: Accumulator | None,
        d_bias: Accumulator | None,
        d_out: Operand,
        x: Operand,
        salt: int = 0,
    ) -> None:
        """d_weight (out_features, in_features) = or += d_out^T @ x, d_bias the sum of d_out's rows.

        None: not wanted, because the parameter is frozen or there is none. A BF16 accumulator
        cannot add inside the product, which would round to nearest every time and lose small
        contributions; it gets the product's BF16 result added with stochastic rounding.
        salt: as in input_gradient.
        """
        if d_weight is not None:
            target = d_weight.tensor
            if target.dtype == F32 or not d_weight.accumulate:
                self._weight_product(target, d_out, x, d_weight.accumulate, salt)
            else:
                with self.dev.scratch("d_weight", target.shape, target.dtype) as product:
                    self._weight_product(product, d_out, x, False, salt)
                    reduce.add(self.dev, d_weight, product)
        if d_bias is not None:
            source = d_out.source if isinstance(d_out, Fp8) else d_out
            bias_op.backward(self.dev, d_bias, source)

    def _weight_product(
        self, out: Tensor, d_out: Operand, x: Operand, accumulate: bool, salt: int
    ) -> None:
        if isinstance(x, Fp8):
            matmul_fp8(
                self.dev, out, d_out.transposed, x.transposed, d_out.scale, x.scale,
                accumulate=accumulate, fast_accumulation=self.fast.d_weight,
            )  # fmt: skip
        else:
            matmul(self.dev, out, d_out, x, trans_a=True, accumulate=accumulate)
