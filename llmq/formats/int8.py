"""int8: products multiply signed bytes, and sum the integers exactly.

    out      = x       (rows, in)  @ weight   (out, in)^T
    d_x      = d_out   (rows, out) @ weight_t (in, out)^T
    d_weight = d_out_t (out, rows) @ x_t      (in, rows)^T

All elements that a product sums into one result share one scale. Weights, activations and gradients
are stored in BF16. Just before a product, both operands are encoded with a scale for each row of
the matrices above: in forward, for each token and each output feature. A frozen weight is stored as
codes, which products multiply unchanged. `ops/product/product.py` computes all three products.

Codes of gradients are rounded stochastically, because rounding to nearest would lose the same small
gradients in every step. All other codes are rounded to nearest, so that recomputed values have the
same codes.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import numpy as np

from llmq.arch.matrix import Matrix
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, I8
from llmq.base.operand import Bytes, BytesRun, Int8, Operand, Rounded, Stochastic
from llmq.base.tensor import Tensor
from llmq.formats.operands import FORWARD, WEIGHT, Operands
from llmq.formats.storage import ROWS, Encoder, Frozen, Storage, StorageLayout
from llmq.ops.quantize import quantize_int8
from llmq.options.options import StepOptions
from llmq.ref.quantize import quantize_int8 as ref

SALT = 0x80000000  # the salts of other kernels count from 0


class Int8Operands(Operands):
    """Operands that stay tensors until a product encodes the tensors."""

    def prepare(self, config: ModelConfig, options: StepOptions, scalars: Tensor | None) -> None:
        super().prepare(config, options, scalars)
        self.multiplied = I8
        self._scalars, self._seq_len = scalars, options.batch.local_seq_len

    def pair(
        self, temps: ExitStack, which: str, a: Operand, b: Operand, matrix: Matrix, salt: int
    ) -> tuple[Operand, Operand]:
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


class Int8Storage(Storage):
    """Frozen matrices stored as signed bytes with a scale for each row."""

    def layout(self, matrix: Frozen) -> StorageLayout:
        rows = matrix.size // matrix.columns
        return {"codes": (matrix.shape, I8), "scale": ((rows,), F32)}

    def piece(self, matrix: Frozen) -> int:
        return max(super().piece(matrix), ROWS * matrix.columns)

    def start(self, matrices: Iterable[Frozen], *, multiplied: bool) -> None:
        if multiplied:
            widest = max(matrix.columns for matrix in matrices)
            self._ones = self.dev.alloc("int8_ones", (widest,), F32, "Activations")
            self.dev.upload(self._ones, np.ones(widest, np.float32))

    def encode(self, encoder: Encoder) -> None:
        """Encode the matrix in pieces of whole rows."""
        columns = encoder.matrix.columns
        for start, size in encoder.pieces(encoder.matrix.size, ROWS * columns):
            count = size // columns
            codes, scales = encoder.codes.view_as(I8).rows(0, size), encoder.scales.rows(0, count)
            x, shape = encoder.read(start, size), (count, columns)
            quantize_int8.rows(self.dev, codes.view(*shape), scales, x.view(*shape))
            encoder.put("codes", codes, start)
            encoder.put("scale", scales, start // columns * F32.itemsize)

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        shape = (matrix.size // matrix.columns, matrix.columns)
        codes = kept["codes"].view(*shape)
        quantize_int8.decode(self.dev, out.view(*shape), codes, kept["scale"])

    def weight(self, kept: Mapping[str, Tensor], transposed: Tensor) -> Operand:
        codes = kept["codes"]
        ones = self._ones.rows(0, codes.shape[-1])
        return Int8(codes=codes, transposed=transposed, scale=kept["scale"], ones=ones)

    def has_coded(self, matrix: Frozen) -> bool:
        return True

    def coded(self, matrix: Frozen, kept: Mapping[str, Tensor]) -> Operand:
        rows, codes = matrix.size // matrix.columns, kept["codes"].view(matrix.size)
        run = BytesRun(0, rows, codes, kept["scale"], of_module=rows, of_scale=1)
        return Bytes(shape=matrix.shape, runs=(run,))

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        x = x.reshape(-1, matrix.columns)
        codes, scale = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
        ref.quantize_int8_rows(codes, scale, x, None, None, 0, 1, *x.shape)
        out = np.empty(x.shape, np.float32)
        ref.quantize_int8_decode(out, codes, scale, *x.shape)
        return out.reshape(-1)
