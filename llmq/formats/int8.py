"""int8: products multiply signed bytes, and sum integers, exactly.

    out      = x       (rows, in)  @ weight   (out, in)^T
    d_x      = d_out   (rows, out) @ weight_t (in, out)^T
    d_weight = d_out_t (out, rows) @ x_t      (in, rows)^T

Elements that a product sums over have one scale. Weights, activations and gradients exist in BF16;
codes of both operands are made just before a product, with a scale for each row as they lie here:
for each token and output feature forward, and so on. A frozen weight that is kept as codes is
multiplied as such. `ops/product.py` computes all of them.

Codes of gradients are rounded stochastically, or what is always lost of small ones would add up
over steps; others to nearest, so that what is computed again is the same.
"""

from __future__ import annotations

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import I8, DType
from llmq.base.operand import Int8, Operand, Rounded, Stochastic
from llmq.base.tensor import Tensor
from llmq.formats.format import FORWARD, WEIGHT, Format, between_blocks
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device

SALT = 0x80000000  # others' salts count from 0


class Int8Format(Format):
    """Operands are tensors until they are multiplied."""

    def __init__(
        self,
        dev: Device,
        shape: tuple[int, int],
        dtype: DType,
        scalars: Tensor | None,
        seq_len: int,
    ):
        """scalars: StepScalars, which backward needs. seq_len: rows of one sequence."""
        super().__init__(dev, shape, dtype)
        self.multiplied = I8
        self._scalars, self._seq_len = scalars, seq_len

    @classmethod
    def of_model(
        cls, dev: Device, config: ModelConfig, options: TrainConfig, scalars: Tensor | None
    ) -> Format:
        return cls(dev, *between_blocks(config, options), scalars, options.local_seq_len)

    def pair(self, which: str, a: Operand, b: Operand, salt: int) -> tuple[Operand, Operand]:
        frozen = isinstance(b, Int8)
        if frozen and which == FORWARD:
            return a, b
        if frozen:
            return self._stochastic(a, salt), b
        if which == FORWARD:
            return Rounded(source=a), Rounded(source=b)
        return self._stochastic(a, 2 * salt + (which == WEIGHT)), Rounded(source=b)

    def _stochastic(self, x: Tensor, salt: int) -> Rounded:
        return Rounded(source=x, stochastic=Stochastic(self._scalars, SALT + salt, self._seq_len))
