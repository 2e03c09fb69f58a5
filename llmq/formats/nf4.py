"""nf4: frozen matrices of four bits, decoded before products; `ops/quantize/four_bits.py` has
codes.

Modules that Hugging Face names are quantized one by one, as others do it. Those of one size that
follow each other, as of experts, are a *run*, whose tensors lie together: one launch decodes it.
`scale` is that of the whole matrix's fp8 codes, if they are made of these.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import E4M3_MAX, F32, U8
from llmq.base.tensor import Tensor
from llmq.formats.storage import Encoder, Frozen, Storage, StorageLayout, piece_of
from llmq.ops.quantize import four_bits
from llmq.ref.quantize import four_bits as ref
from llmq.ref.quantize.quantize import LEAST_ABS_MAX
from llmq.runtime.kernel import ceil_div


class _Run(NamedTuple):
    """first: its first element. size: of each of its modules, of which there are so many."""

    first: int
    size: int
    count: int


def _runs(matrix: Frozen) -> list[_Run]:
    found: list[_Run] = []
    for part in matrix.hf:
        first, size = part.start * matrix.columns, (part.stop - part.start) * matrix.columns
        run = found[-1] if found else None
        if run and run.size == size and run.first + run.count * size == first:
            found[-1] = run._replace(count=run.count + 1)
        else:
            found.append(_Run(first, size, 1))
    return found


class Nf4Storage(Storage):
    """Products take what was decoded."""

    def layout(self, matrix: Frozen) -> StorageLayout:
        found: StorageLayout = {"scale": ((1,), F32)}
        for number, (_, size, count) in enumerate(_runs(matrix)):
            half, blocks, groups = four_bits.sizes(size)
            found |= {
                f"codes.{number}": ((count * half,), U8),
                f"scale_codes.{number}": ((count * blocks,), U8),
                f"groups.{number}": ((count * groups,), F32),
                f"mean.{number}": ((count,), F32),
            }
        return found

    def piece(self, matrix: Frozen) -> int:
        return piece_of(max(run.size * run.count for run in _runs(matrix)))

    def start(self, matrices: Iterable[Frozen], *, multiplied: bool) -> None:
        self._levels = self.dev.alloc("nf4_levels", (four_bits.NUM_LEVELS,), F32, "Quants")
        self.dev.upload(self._levels, ref.scale_levels())

    def encode(self, made: Encoder) -> None:
        largest = [self._run(made, number, run) for number, run in enumerate(_runs(made.matrix))]
        # Each block has an element of level 1 or -1: the largest scale is the largest value.
        scale = max(LEAST_ABS_MAX, *largest) / np.float32(E4M3_MAX)
        self.dev.upload(made.number(1), np.array([scale], np.float32))
        made.put("scale", made.number(1), 0)

    def _run(self, made: Encoder, number: int, run: _Run) -> np.float32:
        """Returns the largest scale. Scales wait here for their means, each of a module."""
        dev, (first, size, count) = self.dev, run
        _, blocks, groups = four_bits.sizes(size)
        found = np.zeros((count, blocks), np.float32)
        for start, n in made.pieces(count * size):
            half, some, _ = four_bits.sizes(n)
            codes, scales = made.codes.rows(0, half), made.scales.rows(0, some)
            four_bits.quantize(dev, codes, scales, made.read(first + start, n))
            made.put(f"codes.{number}", codes, start // 2)
            found.reshape(-1)[start // ref.BLOCK :][:some] = dev.download(scales)
        means = np.array([row.mean(dtype=np.float64) for row in found], np.float32)
        for module in range(count):
            before = module * blocks, module * groups
            self._scales(made, number, before, found[module], means[module : module + 1])
            made.put(f"mean.{number}", made.number(0), module * F32.itemsize)
        return ref.largest_scale(found, means)

    def _scales(
        self,
        made: Encoder,
        number: int,
        before: tuple[int, int],
        scales: np.ndarray,
        mean: np.ndarray,
    ) -> None:
        """Codes of a module's scales. before: blocks and groups of the modules in front of it."""
        dev, step = self.dev, made.scales.size // ref.GROUP * ref.GROUP or scales.size
        dev.upload(made.number(0), mean)
        for start in range(0, scales.size, step):
            part = scales[start : start + step]
            given, codes = made.scales.rows(0, part.size), made.codes.rows(0, part.size)
            groups = made.groups.rows(0, ceil_div(part.size, ref.GROUP))
            dev.upload(given, part)
            four_bits.quantize_scales(dev, codes, groups, given, made.number(0), self._levels)
            made.put(f"scale_codes.{number}", codes, before[0] + start)
            group = before[1] + start // ref.GROUP
            made.put(f"groups.{number}", groups, group * F32.itemsize)

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        if scale is not None:
            self.dev.copy(scale, kept["scale"])
        for number, (first, size, count) in enumerate(_runs(matrix)):
            names = ("codes", "scale_codes", "groups", "mean")
            coded = [kept[f"{name}.{number}"] for name in names]
            flat = out.view(out.size).rows(first, first + count * size)
            four_bits.decode(self.dev, flat, *coded, self._levels, fp8_scale=scale)

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        out, levels = np.empty(x.size, np.float32), ref.scale_levels()
        for part in matrix.hf:
            own = slice(part.start * matrix.columns, part.stop * matrix.columns)
            n = own.stop - own.start
            half, blocks, num_groups = four_bits.sizes(n)
            codes, scales = np.empty(half, np.uint8), np.empty(blocks, np.float32)
            ref.nf4_quantize(codes, scales, x[own], n)
            mean = scales.mean(dtype=np.float64, keepdims=True).astype(np.float32)
            scale_codes, groups = np.empty(blocks, np.uint8), np.empty(num_groups, np.float32)
            ref.nf4_quantize_scales(scale_codes, groups, scales, mean, levels, blocks)
            ref.nf4_decode(out[own], codes, scale_codes, groups, mean, levels, n)
        return out
