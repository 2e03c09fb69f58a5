"""nvfp4: frozen matrices are stored as 4-bit codes like NVIDIA's published files, and decoded
before products.

Each module of the Hugging Face model is quantized by itself: `ops/quantize/nvfp4.py`. Codes, scales
and factors are copied unchanged from NVIDIA's files.
"""

from collections.abc import Mapping

import numpy as np

from llmq.base.dtypes import E4M3, F32, U8
from llmq.base.tensor import Tensor
from llmq.formats.storage import Encoder, Frozen, Run, Storage, StorageLayout, piece_of, runs_of
from llmq.ops.quantize import fp8_scale, nvfp4
from llmq.ref.quantize import nvfp4 as ref


class Nvfp4Storage(Storage):
    """Frozen matrices stored as 4-bit codes. Products read decoded matrices."""

    def layout(self, matrix: Frozen) -> StorageLayout:
        layout: StorageLayout = {}
        for number, run in enumerate(runs_of(matrix)):
            size = run.count * run.size
            layout |= {
                f"codes.{number}": ((size // 2,), U8),
                f"scales.{number}": ((size // ref.BLOCK,), E4M3),
                f"factors.{number}": ((run.count,), F32),
            }
        return layout

    def piece(self, matrix: Frozen) -> int:
        return piece_of(max(run.size for run in runs_of(matrix)))

    def encode(self, encoder: Encoder) -> None:
        for number, run in enumerate(runs_of(encoder.matrix)):
            nbytes = {"codes": run.size // 2, "scales": run.size // ref.BLOCK, "factors": 4}
            for index in range(run.count):
                if not encoder.copied(number, run, index, nbytes):
                    self._encode(encoder, number, run, index)

    def _encode(self, encoder: Encoder, number: int, run: Run, index: int) -> None:
        dev, largest, factor = self.dev, encoder.number(0), encoder.number(1)
        first, pieces = run.first + index * run.size, [*encoder.pieces(run.size, ref.BLOCK)]
        dev.zero(largest)
        for start, count in pieces:
            fp8_scale.abs_max(dev, largest, encoder.read(first + start, count))
        for start, count in pieces:
            half, blocks = count // 2, count // ref.BLOCK
            codes = encoder.codes.rows(0, half)
            scales = encoder.scales.view_as(E4M3, (blocks,))
            nvfp4.encode(dev, codes, scales, factor, encoder.read(first + start, count), largest)
            before = index * run.size + start
            encoder.put(f"codes.{number}", codes, before // 2)
            encoder.put(f"scales.{number}", scales, before // ref.BLOCK)
        encoder.put(f"factors.{number}", factor, index * F32.itemsize)

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        for number, run in enumerate(runs_of(matrix)):
            coded = (kept[f"{name}.{number}"] for name in ("codes", "scales", "factors"))
            nvfp4.decode(self.dev, run.of(out), *coded)

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        out = np.empty(x.size, np.float32)
        for part in matrix.hf:
            span = slice(part.start * matrix.columns, part.stop * matrix.columns)
            own, largest = x[span], np.abs(x[span]).max(keepdims=True).astype(np.float32)
            codes = np.empty(own.size // 2, np.uint8)
            scales, factor = np.empty(own.size // ref.BLOCK, E4M3.numpy), np.empty(1, np.float32)
            ref.nvfp4_encode(codes, scales, factor, own, largest, own.size)
            ref.nvfp4_decode(out[span], codes, scales, factor, own.size)
        return out
