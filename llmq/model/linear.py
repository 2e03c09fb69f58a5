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

from llmq.base.dtypes import E4M3, E5M2, F32, DType
from llmq.base.operand import Activated, ActivatedGradient, Fp8, Operand, ProductCodes
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops import bias as bias_op
from llmq.ops import (
    matmul_adapted,
    matmul_gradient,
    matmul_swiglu,
    matmul_swiglu_backward,
    reduce,
)
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


def multiplied(x: Operand) -> Tensor:
    """What products multiply as it lies."""
    return x.codes if isinstance(x, Fp8) else x


class Linear:
    """The products of linear layers on one device."""

    fuses = True  # whether products may be of our own, with more in them, where that is faster
    adds = True  # whether forward takes an addend

    def __init__(self, dev: Device, fast: Fast = EXACT):
        self.dev, self.fast = dev, fast

    def _may_fuse(self, is_fp8: bool, backward: bool) -> bool:
        """Of products of our own: of fp8 codes they always sum with fewer bits."""
        fast = self.fast.d_x if backward else self.fast.forward
        return self.fuses and (fast or not is_fp8)

    def joins(
        self, out: Tensor, dtype: DType, features: int, h: Tensor, *, backward: bool = False
    ) -> bool:
        """Whether `fused` is the way to compute out with the adapters' part, h as there.

        dtype, features: of x, as products multiply it.
        """
        if not self._may_fuse(dtype in (E4M3, E5M2), backward):
            return False
        return matmul_adapted.is_faster(self.dev, out, dtype, features, h)

    def activates(
        self, x: Operand, weight: Operand, F: int, rank: int, *, backward: bool = False
    ) -> bool:
        """Whether `fused` is the way to compute a gated activation (rows, F) of the product.

        backward: the activation's gradient. rank: R, of the adapters' part; 0: there is none.
        """
        if not self._may_fuse(isinstance(weight, Fp8), backward):
            return False
        operation = matmul_swiglu_backward if backward else matmul_swiglu
        return operation.serves(self.dev, multiplied(x), F, rank)

    def fused(
        self,
        out: Tensor | ProductCodes | Activated | ActivatedGradient,
        x: Operand,
        weight: Operand,
        h: Tensor | None = None,
        tail: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        addend: Tensor | None = None,
        backward: bool = False,
    ) -> None:
        """out = x @ weight^T + h @ tail^T + bias + addend, rounded once.

        backward: out = x @ weight + h @ tail.

        Args:
            out, x  (rows, out_features), (rows, in_features); backward: the other way round
            h       (rows, R); or None
            tail    (out_features, R), B; backward: (R, in_features), A; or None
            addend  like out, which is a tensor then; or None
        """
        operands: tuple[Tensor | None, ...] = (x, weight, h, tail)
        if isinstance(weight, Fp8):
            codes = weight.transposed if backward else weight.codes
            operands = (x.codes, codes, h, tail, x.scale, weight.scale)
        if isinstance(out, ProductCodes):
            matmul_swiglu.forward(self.dev, out, None, *operands)
        elif isinstance(out, Activated):
            up_gate, to, gelu = out
            matmul_swiglu.forward(
                self.dev, up_gate, to.out, *operands, gelu=gelu, abs_max=to.abs_max, fp8=to.fp8
            )
        elif isinstance(out, ActivatedGradient):
            x, weight, *others = operands
            up_gate, to, act, gelu = out
            matmul_swiglu_backward.backward(
                self.dev, to.out, x, weight, up_gate, *others, gelu=gelu,
                abs_max=to.abs_max, fp8=to.fp8, out=act,
            )  # fmt: skip
        else:
            matmul_adapted.matmul_adapted(
                self.dev, out, *operands, bias=bias, addend=addend, transposed=backward
            )

    def forward(
        self,
        out: Tensor | ProductCodes,
        x: Operand,
        weight: Operand,
        bias: Tensor | None = None,
        *,
        addend: Tensor | None = None,
    ) -> None:
        """out (rows, out_features) = x (rows, in_features) @ weight^T + bias, + addend like out.

        Fp8 products can write codes, without an addend, here and in input_gradient.
        """
        if isinstance(weight, Fp8):
            matmul_fp8(
                self.dev, out, x.codes, weight.codes, x.scale, weight.scale,
                bias=bias, addend=addend, fast_accumulation=self.fast.forward,
            )  # fmt: skip
        else:
            matmul(self.dev, out, x, weight, trans_b=True, bias=bias, addend=addend)

    def input_gradient(
        self, d_x: Tensor | ProductCodes, d_out: Operand, weight: Operand, salt: int = 0
    ) -> None:
        """d_x (rows, in_features) = d_out (rows, out_features) @ weight.

        salt: a number of this weight's own, for products that round their operands stochastically.
        """
        if isinstance(weight, Fp8):
            matmul_fp8(
                self.dev, d_x, d_out.codes, weight.transposed, d_out.scale, weight.scale,
                fast_accumulation=self.fast.d_x,
            )  # fmt: skip
        else:
            matmul(self.dev, d_x, d_out, weight)

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
        cannot add inside the library's product, which would round to nearest every time and lose
        small contributions; it gets the product's BF16 result added with stochastic rounding, by a
        product of our own where that is faster. salt: as in input_gradient.
        """
        if d_weight is not None and not self._added(d_weight, d_out, x):
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

    def _added(self, d_weight: Accumulator, d_out: Operand, x: Operand) -> bool:
        """Adds to the gradient by a product of our own, where that is the way; whether it is."""
        if not isinstance(x, Fp8):
            return False
        depth = x.transposed.shape[1]
        if not matmul_gradient.serves(self.dev, d_weight.tensor, depth):
            return False
        matmul_gradient.add(
            self.dev, d_weight, d_out.transposed, x.transposed, d_out.scale, x.scale,
            fast_accumulation=self.fast.d_weight,
        )  # fmt: skip
        return True

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
