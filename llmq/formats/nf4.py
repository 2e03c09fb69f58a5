"""nf4: frozen matrices are stored as 4-bit codes (`ops/quantize/four_bits.py`), and decoded before
products.

Each module of the Hugging Face model is quantized by itself, as bitsandbytes does. Adjacent modules
of one size, such as experts, form a *run*: the tensors of a run are stored together, and one launch
decodes a whole run. The tensor `scale` is the scale of the matrix's fp8 codes, if products multiply
fp8 codes.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from llmq.base.dtypes import E4M3_MAX, F32, U8
from llmq.base.operand import Nf4, Nf4Run, Operand
from llmq.base.tensor import Tensor
from llmq.formats.storage import (
    Encoder,
    Frozen,
    Run,
    Storage,
    StorageLayout,
    piece_of,
    runs_of,
)
from llmq.ops.quantize import four_bits
from llmq.ref.quantize import four_bits as ref
from llmq.ref.quantize.quantize import LEAST_ABS_MAX
from llmq.runtime.kernel import ceil_div


class Nf4Storage(Storage):
    """Frozen matrices stored as 4-bit codes. Products read decoded matrices; products of few rows
    read the codes."""

    def layout(self, matrix: Frozen) -> StorageLayout:
        layout: StorageLayout = {"scale": ((1,), F32)}
        for number, run in enumerate(runs_of(matrix)):
            (half, blocks, groups), count = four_bits.sizes(run.size), run.count
            layout |= {
                f"codes.{number}": ((count * half,), U8),
                f"scale_codes.{number}": ((count * blocks,), U8),
                f"groups.{number}": ((count * groups,), F32),
                f"mean.{number}": ((count,), F32),
            }
        return layout

    def piece(self, matrix: Frozen) -> int:
        return piece_of(max(run.size * run.count for run in runs_of(matrix)))

    def start(self, matrices: Iterable[Frozen], *, multiplied: bool) -> None:
        self._levels = self.dev.alloc("nf4_levels", (four_bits.NUM_LEVELS,), F32, "Quants")
        self.dev.upload(self._levels, ref.scale_levels())

    def encode(self, encoder: Encoder) -> None:
        largest = [
            self._run(encoder, number, run) for number, run in enumerate(runs_of(encoder.matrix))
        ]
        # Every 64 elements with one scale include a code of value 1 or -1, so the largest scale is
        # the largest |x|.
        scale = max(LEAST_ABS_MAX, *largest) / np.float32(E4M3_MAX)
        self.dev.upload(encoder.number(1), np.array([scale], np.float32))
        encoder.put("scale", encoder.number(1), 0)

    def _run(self, encoder: Encoder, number: int, run: Run) -> np.float32:
        """Encode a run of modules, and return the run's largest scale. The scales of a module stay
        on the host until their mean is known."""
        dev, first, size, count = self.dev, run.first, run.size, run.count
        _, blocks, groups = four_bits.sizes(size)
        all_scales = np.zeros((count, blocks), np.float32)
        for start, n in encoder.pieces(count * size):
            half, some, _ = four_bits.sizes(n)
            codes, scales = encoder.codes.rows(0, half), encoder.scales.rows(0, some)
            four_bits.quantize(dev, codes, scales, encoder.read(first + start, n))
            encoder.put(f"codes.{number}", codes, start // 2)
            all_scales.reshape(-1)[start // ref.BLOCK :][:some] = dev.download(scales)
        means = np.array([row.mean(dtype=np.float64) for row in all_scales], np.float32)
        for module in range(count):
            before = module * blocks, module * groups
            self._scales(encoder, number, before, all_scales[module], means[module : module + 1])
            encoder.put(f"mean.{number}", encoder.number(0), module * F32.itemsize)
        return ref.largest_scale(all_scales, means)

    def _scales(
        self,
        encoder: Encoder,
        number: int,
        before: tuple[int, int],
        scales: np.ndarray,
        mean: np.ndarray,
    ) -> None:
        """Encode the scales of a module. before: (number of scales, number of groups of scales) of
        the modules that precede this module in the run."""
        dev, step = self.dev, encoder.scales.size // ref.GROUP * ref.GROUP or scales.size
        dev.upload(encoder.number(0), mean)
        for start in range(0, scales.size, step):
            part = scales[start : start + step]
            given, codes = encoder.scales.rows(0, part.size), encoder.codes.rows(0, part.size)
            groups = encoder.groups.rows(0, ceil_div(part.size, ref.GROUP))
            dev.upload(given, part)
            four_bits.quantize_scales(dev, codes, groups, given, encoder.number(0), self._levels)
            encoder.put(f"scale_codes.{number}", codes, before[0] + start)
            group = before[1] + start // ref.GROUP
            encoder.put(f"groups.{number}", groups, group * F32.itemsize)

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        if scale is not None:
            self.dev.copy(scale, kept["scale"])
        for number, run in enumerate(runs_of(matrix)):
            names = ("codes", "scale_codes", "groups", "mean")
            coded = [kept[f"{name}.{number}"] for name in names]
            four_bits.decode(self.dev, run.of(out), *coded, self._levels, fp8_scale=scale)

    def has_coded(self, matrix: Frozen) -> bool:
        """Return True if each row has a whole number of scales, and experts' matrices lie in one
        run."""
        one = len(matrix.shape) == 2 or len(runs_of(matrix)) == 1
        return one and matrix.columns % ref.BLOCK == 0

    def coded(self, matrix: Frozen, kept: Mapping[str, Tensor]) -> Operand:
        runs, columns = [], matrix.columns
        for number, run in enumerate(runs_of(matrix)):
            coded = (kept[f"{n}.{number}"] for n in ("codes", "scale_codes", "groups", "mean"))
            rows = run.count * run.size // columns
            runs.append(Nf4Run(run.first // columns, rows, *coded))
        return Nf4(shape=matrix.shape, runs=tuple(runs), levels=self._levels)

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        out, levels = np.empty(x.size, np.float32), ref.scale_levels()
        for part in matrix.hf:
            span = slice(part.start * matrix.columns, part.stop * matrix.columns)
            n = span.stop - span.start
            half, blocks, num_groups = four_bits.sizes(n)
            codes, scales = np.empty(half, np.uint8), np.empty(blocks, np.float32)
            ref.nf4_quantize(codes, scales, x[span], n)
            mean = scales.mean(dtype=np.float64, keepdims=True).astype(np.float32)
            scale_codes, groups = np.empty(blocks, np.uint8), np.empty(num_groups, np.float32)
            ref.nf4_quantize_scales(scale_codes, groups, scales, mean, levels, blocks)
            ref.nf4_decode(out[span], codes, scale_codes, groups, mean, levels, n)
        return out
