"""e4m3-blocks: frozen matrices are stored as fp8 codes like DeepSeek's files, and decoded before
products.

Each tile of 128 rows and 128 columns of a Hugging Face module has one scale:
`ops/quantize/fp8_blocks.py`. Codes and scales are copied unchanged from DeepSeek's files.
"""

from collections.abc import Mapping

import numpy as np

from llmq.base.dtypes import E4M3, F32
from llmq.base.operand import Bytes, BytesRun, Operand
from llmq.base.tensor import Tensor
from llmq.formats.storage import Encoder, Frozen, Run, Storage, StorageLayout, runs_of
from llmq.ops.quantize import fp8_blocks
from llmq.ops.quantize.fp8_blocks import BLOCK
from llmq.ref.quantize import fp8_blocks as ref
from llmq.runtime.kernel import ceil_div


def _scales(size: int, columns: int) -> int:
    """Return the number of scales of a module of `size` elements."""
    return ceil_div(size // columns, BLOCK) * ceil_div(columns, BLOCK)


class E4m3BlocksStorage(Storage):
    """Frozen matrices stored as fp8 codes with a scale for each tile of 128 x 128. Products read
    decoded matrices; products of few rows read the codes."""

    def layout(self, matrix: Frozen) -> StorageLayout:
        layout: StorageLayout = {}
        for number, run in enumerate(runs_of(matrix)):
            scales = run.count * _scales(run.size, matrix.columns)
            layout |= {
                f"codes.{number}": ((run.count * run.size,), E4M3),
                f"scales.{number}": ((scales,), F32),
            }
        return layout

    def piece(self, matrix: Frozen) -> int:
        return min(matrix.size, max(super().piece(matrix), BLOCK * matrix.columns))

    def encode(self, encoder: Encoder) -> None:
        columns = encoder.matrix.columns
        for number, run in enumerate(runs_of(encoder.matrix)):
            nbytes = {"codes": run.size, "scales": 4 * _scales(run.size, columns)}
            for index in range(run.count):
                if not encoder.copied(number, run, index, nbytes):
                    self._encode(encoder, number, run, index)

    def _encode(self, encoder: Encoder, number: int, run: Run, index: int) -> None:
        """Encode a module in pieces of whole tiles. index: the module's index in the run."""
        columns, before = encoder.matrix.columns, index * run.size
        for start, size in encoder.pieces(run.size, min(BLOCK * columns, run.size)):
            shape = size // columns, columns
            codes = encoder.codes.rows(0, size).view_as(E4M3)
            scales = encoder.scales.rows(0, _scales(size, columns))
            x = encoder.read(run.first + before + start, size).view(*shape)
            fp8_blocks.encode(self.dev, codes.view(*shape), scales, x)
            encoder.put(f"codes.{number}", codes, before + start)
            done = index * _scales(run.size, columns) + _scales(start, columns)
            encoder.put(f"scales.{number}", scales, done * F32.itemsize)

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        for number, run in enumerate(runs_of(matrix)):
            shape = run.count, run.size // matrix.columns, matrix.columns
            codes, scales = (kept[f"{name}.{number}"] for name in ("codes", "scales"))
            fp8_blocks.decode(self.dev, run.of(out).view(*shape), codes.view(*shape), scales)

    def has_coded(self, matrix: Frozen) -> bool:
        """Return False if a matrix of experts lies in several runs, else True."""
        return len(matrix.shape) == 2 or len(runs_of(matrix)) == 1

    def coded(self, matrix: Frozen, kept: Mapping[str, Tensor]) -> Operand:
        columns, runs = matrix.columns, []
        for number, run in enumerate(runs_of(matrix)):
            first, rows = (n // columns for n in (run.first, run.count * run.size))
            tensors = (kept[f"{name}.{number}"] for name in ("codes", "scales"))
            form = (run.size // columns, BLOCK, ceil_div(columns, BLOCK))
            runs.append(BytesRun(first, rows, *tensors, *form))
        return Bytes(shape=matrix.shape, runs=tuple(runs))

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        columns = matrix.columns
        x, out = x.reshape(-1, columns), np.empty((x.size // columns, columns), np.float32)
        for part in matrix.hf:
            own, rows = x[part.start : part.stop], part.stop - part.start
            codes = np.empty(own.shape, E4M3.numpy)
            scales = np.empty(_scales(own.size, columns), np.float32)
            ref.fp8_blocks_encode(codes, scales, own, rows, columns)
            target = out[None, part.start : part.stop]
            ref.fp8_blocks_decode(target, codes[None], scales, rows, columns)
        return out.reshape(-1)
