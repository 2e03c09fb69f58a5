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

from llmq.base.dtypes import F32, I8, DType
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.model.linear import BACKWARD, FORWARD, Linear
from llmq.ops import quantize_int8
from llmq.ops.matmul_int8 import matmul_int8
from llmq.ops.product import Multiply
from llmq.ops.quantize_int8 import Stochastic
from llmq.runtime.device import Device

SALT = 0x80000000  # others' salts count from 0

Codes = tuple[Tensor, Tensor]  # I8 (rows, columns), and their scales F32 (rows,)


class Int8Linear(Linear):
    """The products of linear layers on one device. Operands are tensors."""

    def __init__(self, dev: Device, scalars: Tensor | None, seq_len: int):
        """scalars: StepScalars, which backward needs. seq_len: rows of one sequence."""
        super().__init__(dev)
        self._scalars, self._seq_len = scalars, seq_len

    def takes_addend(self, out: Tensor, dtype: DType, features: int, hidden: Tensor | None) -> bool:
        return False

    def multiply(self, which: str, a: Operand, b: Operand, salt: int) -> Multiply:
        def multiply(out: Tensor, *, bias: Tensor | None = None, accumulate: bool = False) -> None:
            if which == FORWARD:
                codes = self._rows(a), self._rows(b)
            elif which == BACKWARD:
                codes = self._rows(a, 2 * salt), self._columns(b)
            else:
                codes = self._columns(a, 2 * salt + 1), self._columns(b)
            with codes[0] as (left, scale_a), codes[1] as (right, scale_b):
                matmul_int8(
                    self.dev, out, left, right, scale_a, scale_b, bias=bias, accumulate=accumulate
                )

        return multiply

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
