"""Products of a frozen weight of signed bytes, with a scale for each of its rows.

    out = x @ weight^T     x as codes with a scale for each token, but for its outliers: columns
                           with an element beyond THRESHOLD, which are multiplied as they are
    d_x = d_out @ weight   d_out times the scales of the weight's rows, over which it is summed, as
                           codes with a scale for each token

Sums of codes are exact. The columns that are outliers follow from x alone, so that what is computed
again is the same.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, I8, I32, DType
from llmq.base.operand import Int8, Operand
from llmq.base.tensor import Tensor
from llmq.model.int8_linear import SALT
from llmq.model.linear import FORWARD, Linear
from llmq.ops import outliers, quantize_int8
from llmq.ops.matmul import matmul
from llmq.ops.matmul_int8 import matmul_int8
from llmq.ops.product import Multiply
from llmq.ops.quantize_int8 import Stochastic
from llmq.runtime.device import Device

THRESHOLD = 6.0  # the paper's
MOST = 64  # outliers of an activation: about ten times as many as the paper finds


class Int8BaseLinear(Linear):
    """The products of the blocks' matrices on one device."""

    def __init__(self, dev: Device, config: ModelConfig, scalars: Tensor | None, seq_len: int):
        """scalars: StepScalars, for the rounding of gradients' codes. seq_len: of a sequence."""
        super().__init__(dev)
        self._scalars, self._seq_len = scalars, seq_len
        widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        ones = np.ones(max(widths), np.float32)
        self._ones = dev.alloc("int8_ones", ones.shape, F32, "Activations")
        dev.upload(self._ones, ones)

    def takes_addend(self, out: Tensor, dtype: DType, features: int, hidden: Tensor | None) -> bool:
        return False

    def multiply(self, which: str, a: Operand, b: Operand, salt: int) -> Multiply:
        if which == FORWARD:
            return partial(self._forward, x=a, weight=b)
        return partial(self._input_gradient, d_out=a, weight=b, salt=salt)

    def _forward(self, out: Tensor, *, x: Tensor, weight: Int8, bias: Tensor | None = None) -> None:
        dev, (rows, columns) = self.dev, x.shape
        with ExitStack() as temps:

            def scratch(name: str, dtype: DType, *shape: int) -> Tensor:
                return temps.enter_context(dev.scratch(name, shape, dtype))

            mask, index = scratch("outliers.mask", F32, columns), scratch("outliers", I32, MOST)
            largest = scratch("column_max", F32, columns)
            quantize_int8.largest_of_columns(dev, largest, x)
            outliers.select(dev, mask, index, largest, THRESHOLD)
            codes, scale = scratch("x.q", I8, rows, columns), scratch("x.scale", F32, rows)
            quantize_int8.rows(dev, codes, scale, x, factors=mask)
            matmul_int8(dev, out, codes, weight.codes, scale, weight.scale, bias=bias)
            large = scratch("x.outliers", x.dtype, rows, MOST)
            part = scratch("weight.outliers", x.dtype, out.shape[1], MOST)
            outliers.take(dev, large, x, index)
            outliers.weight(dev, part, weight.codes, weight.scale, index)
            matmul(dev, out, large, part, trans_b=True, accumulate=True)

    def _input_gradient(self, d_x: Tensor, *, d_out: Tensor, weight: Int8, salt: int) -> None:
        dev, ones = self.dev, self._ones.rows(0, d_x.shape[1])
        rounding = Stochastic(self._scalars, SALT + salt, self._seq_len)
        with (
            dev.scratch("d_out.q", d_out.shape, I8) as codes,
            dev.scratch("d_out.scale", d_out.shape[:1], F32) as scale,
        ):
            quantize_int8.rows(dev, codes, scale, d_out, factors=weight.scale, stochastic=rounding)
            matmul_int8(dev, d_x, codes, weight.transposed, scale, ones)
