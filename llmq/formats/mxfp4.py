"""mxfp4: frozen experts are stored as 4-bit codes like gpt-oss's files, and decoded before
products.

Weights from gpt-oss's files are stored without loss: encoding the decoded values gives the same
codes (`ops/quantize/four_bits.py`). All other matrices of blocks stay BF16, as in gpt-oss's files.
"""

from collections.abc import Mapping

import numpy as np

from llmq.base.dtypes import BF16, U8, DType
from llmq.base.operand import Mxfp4, Operand
from llmq.base.tensor import Tensor
from llmq.formats.storage import Encoder, Frozen, Storage, StorageLayout
from llmq.ops.pointwise.elementwise import convert
from llmq.ops.quantize import four_bits
from llmq.ref.quantize import four_bits as ref


def _of_experts(matrix: Frozen) -> bool:
    return len(matrix.shape) == 3


def _bytes_as(scratch: Tensor, dtype: DType) -> Tensor:
    shape = (scratch.nbytes // dtype.itemsize,)
    return Tensor(scratch.name, shape, dtype, scratch.storage, scratch.offset)


class Mxfp4Storage(Storage):
    """Frozen experts stored as 4-bit codes. Products read decoded matrices; products of few rows
    read the codes."""

    def layout(self, matrix: Frozen) -> StorageLayout:
        if not _of_experts(matrix):
            return {"values": ((matrix.size,), BF16)}
        blocks = matrix.size // ref.MXFP4_BLOCK
        return {"codes": ((matrix.size // 2,), U8), "exponents": ((blocks,), U8)}

    def encode(self, encoder: Encoder) -> None:
        if not _of_experts(encoder.matrix):
            self._values(encoder)
            return
        for first, count in encoder.pieces(encoder.matrix.size, ref.MXFP4_BLOCK):
            codes = encoder.codes.rows(0, count // 2)
            exponents = _bytes_as(encoder.scales, U8).rows(0, count // ref.MXFP4_BLOCK)
            four_bits.encode_mxfp4(self.dev, codes, exponents, encoder.read(first, count))
            encoder.put("codes", codes, first // 2)
            encoder.put("exponents", exponents, first // ref.MXFP4_BLOCK)

    def _values(self, encoder: Encoder) -> None:
        rounded = _bytes_as(encoder.codes, BF16)
        for first, count in encoder.pieces(encoder.matrix.size):
            x = encoder.read(first, count)
            step = count if x.dtype == BF16 else rounded.size
            for start in range(0, count, step):
                part = x.rows(start, min(start + step, count))
                if x.dtype != BF16:
                    convert(self.dev, rounded.rows(0, part.size), part)
                    part = rounded.rows(0, part.size)
                encoder.put("values", part, BF16.itemsize * (first + start))

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        flat = out.view(matrix.size)
        if _of_experts(matrix):
            four_bits.decode_mxfp4(self.dev, flat, kept["codes"], kept["exponents"])
        else:
            convert(self.dev, flat, kept["values"])

    def has_coded(self, matrix: Frozen) -> bool:
        return not _of_experts(matrix) or matrix.columns % ref.MXFP4_BLOCK == 0

    def coded(self, matrix: Frozen, kept: Mapping[str, Tensor]) -> Operand:
        if not _of_experts(matrix):
            return kept["values"].view(*matrix.shape)
        return Mxfp4(shape=matrix.shape, **kept)

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        if not _of_experts(matrix):
            return x.astype(BF16.numpy).astype(np.float32)
        codes, exponents = (np.empty(x.size // n, np.uint8) for n in (2, ref.MXFP4_BLOCK))
        ref.mxfp4_encode(codes, exponents, x, x.size)
        out = np.empty(x.size, np.float32)
        ref.mxfp4_decode(out, codes, exponents, x.size)
        return out
