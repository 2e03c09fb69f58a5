"""A linear layer whose products multiply signed bytes, all three of them.

    out      = x       (rows, in)  @ weight   (out, in)^T
    d_x      = d_out   (rows, out) @ weight_t (in, out)^T
    d_weight = d_out_t (out, rows) @ x_t      (in, rows)^T

The codes of both matrices are made just before a product, in scratch, with a scale for each row as
they lie here: for each token and output feature forward, and so on. What a product sums over has
one scale, so that it sums integers, exactly. Everything else is as it is without int8: weights,
activations and gradients exist in BF16, and nobody else knows of codes.

Codes of gradients are rounded stochastically, or what is always lost of small ones would add up
over steps; others to nearest, so that what is computed again is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmq.base.dtypes import F32, I8
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.model.linear import Linear
from llmq.ops import quantize_int8
from llmq.ops.matmul_int8 import matmul_int8
from llmq.ops.quantize_int8 import Stochastic
from llmq.runtime.device import Device

SALT = 0x80000000  # others' salts count from 0

Codes = tuple[Tensor, Tensor]  # I8 (rows, columns), and their scales F32 (rows,)


class Int8Linear(Linear):
    """The products of linear layers on one device. Operands are tensors."""

    fuses = adds = False

    def __init__(self, dev: Device, scalars: Tensor | None, seq_len: int):
        """scalars: StepScalars, which backward needs. seq_len: rows of one sequence."""
        super().__init__(dev)
        self._scalars, self._seq_len = scalars, seq_len

    def forward(self, out: Tensor, x: Operand, weight: Operand, bias: Tensor | None = None) -> None:
        with self._rows(x) as left, self._rows(weight) as right:
            self._product(out, left, right, bias=bias)

    def input_gradient(self, d_x: Tensor, d_out: Operand, weight: Operand, salt: int = 0) -> None:
        with self._rows(d_out, 2 * salt) as left, self._columns(weight) as right:
            self._product(d_x, left, right)

    def _weight_product(
        self, out: Tensor, d_out: Operand, x: Operand, accumulate: bool, salt: int
    ) -> None:
        with self._columns(d_out, 2 * salt + 1) as left, self._columns(x) as right:
            self._product(out, left, right, accumulate=accumulate)

    @contextmanager
    def _rows(self, x: Tensor, salt: int | None = None) -> Iterator[Codes]:
        """Codes of x as it lies. salt: of stochastic rounding."""
        with self._scratch(x.shape) as (codes, scales):
            quantize_int8.rows(self.dev, codes, scales, x, stochastic=self._rounding(salt))
            yield codes, scales

    @contextmanager
    def _columns(self, x: Tensor, salt: int | None = None) -> Iterator[Codes]:
        """Codes of its transpose."""
        with self._scratch(x.shape[::-1]) as (codes, scales):
            quantize_int8.columns(self.dev, codes, scales, x, stochastic=self._rounding(salt))
            yield codes, scales

    @contextmanager
    def _scratch(self, shape: tuple[int, ...]) -> Iterator[Codes]:
        with (
            self.dev.scratch("int8_codes", shape, I8) as codes,
            self.dev.scratch("int8_scales", shape[:1], F32) as scales,
        ):
            yield codes, scales

    def _rounding(self, salt: int | None) -> Stochastic | None:
        return None if salt is None else Stochastic(self._scalars, SALT + salt, self._seq_len)

    def _product(
        self,
        out: Tensor,
        left: Codes,
        right: Codes,
        *,
        bias: Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        (a, scale_a), (b, scale_b) = left, right
        matmul_int8(self.dev, out, a, b, scale_a, scale_b, bias=bias, accumulate=accumulate)
