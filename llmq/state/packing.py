"""Codes of blocks that are not trained, made while their weights are read, piece by piece.

A rank makes the codes of all of a block and keeps its part of the bytes. So scales are the same on
all ranks, and nothing has to be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import BF16, E4M3, E4M3_MAX, F32, I8, NF4, U8, DType
from llmq.base.tensor import Tensor
from llmq.ops import abs_max, nf4, quantize, quantize_int8
from llmq.ref.nf4 import BLOCK, GROUP, scale_levels
from llmq.ref.quantize import LEAST_ABS_MAX
from llmq.runtime.device import Device
from llmq.state.bases import Bases
from llmq.state.packed import Region, Span
from llmq.state.params import Param

PIECE = 1 << 22  # elements on the device at a time: whole groups of NF4's scales
ROWS = 16  # of INT8 codes that are made at once, and their least number of columns
NUMBER = 4  # elements of F32 from one number to the next, 16 bytes

Write = Callable[[Tensor, int], None]
"""Fills a tensor (n,) with the elements of a parameter from this one on."""
Source = Callable[[Param], tuple[Write, DType]]
"""Returns the writer of a parameter's elements, and their format, F32 or BF16."""
Elements = Callable[[Param, int, int], np.ndarray]
"""Elements [start, stop) of a parameter, flat, F32 or BF16."""


def of_host(dev: Device, elements: Elements) -> Source:
    """Parameters as they are read."""

    def source(param: Param) -> tuple[Write, DType]:
        def write(target: Tensor, first: int) -> None:
            dev.upload(target, elements(param, first, first + target.size))

        return write, BF16 if elements(param, 0, BLOCK).dtype == BF16.numpy else F32

    return source


def one_by_one(read: Callable[[Param], np.ndarray]) -> Elements:
    """Read parameters that are read as a whole, the last of which is kept."""
    last: dict[str, np.ndarray] = {}

    def elements(param: Param, start: int, stop: int) -> np.ndarray:
        if param.name not in last:
            last.clear()
            last[param.name] = read(param).reshape(-1)
        return last[param.name][start:stop]

    return elements


class _Scratch(NamedTuple):
    """x: elements; codes: U8, one for each; scales, groups: F32, groups of NF4; numbers: F32."""

    x: Tensor
    codes: Tensor
    scales: Tensor
    groups: Tensor
    numbers: Tensor

    def number(self, index: int) -> Tensor:
        """F32 (1,)."""
        return self.numbers.rows(NUMBER * index, NUMBER * index + 1)


class Packer:
    """Fills the bytes of `bases`.

    Its scratch is taken once when it is made, so that plans know of it.
    """

    def __init__(self, dev: Device, bases: Bases):
        self.dev, self.bases = dev, bases
        spans = [span for layout in bases.layouts.values() for span in layout.spans]
        self._piece = min(PIECE, max(span.size for span in spans))
        if bases.layouts[spans[0].param.block].dtype == I8:  # at least the rows of a product
            widest = max(span.param.columns for span in spans)
            self._piece = max(self._piece, ROWS * widest)
        with self._scratch(F32):
            pass

    @contextmanager
    def _scratch(self, dtype: DType) -> Iterator[_Scratch]:
        take, n = self.dev.scratch, self._piece
        blocks = -(-n // ROWS)  # no row is shorter, nor is a block of NF4
        with (
            take("base.x", (n,), dtype) as x,
            take("base.codes", (n,), U8) as codes,
            take("base.scales", (blocks,), F32) as scales,
            take("base.groups", (-(-blocks // GROUP),), F32) as groups,
            take("base.numbers", (2 * NUMBER,), F32) as numbers,
        ):
            yield _Scratch(x, codes, scales, groups, numbers)

    def fill(self, source: Source) -> None:
        """Make the bytes of all blocks."""
        for name in self.bases.slabs:
            self._fill(name, source)

    def _fill(self, name: str, source: Source) -> None:
        spans = self.bases.layouts[name].spans
        for param, group in groupby(spans, key=attrgetter("param")):
            write, dtype = source(param)
            with self._scratch(dtype) as temps:
                if self.bases.layouts[name].dtype == NF4:
                    self._fill_nf4(name, [*group], write, temps)
                elif self.bases.layouts[name].dtype == I8:
                    self._fill_int8(name, next(group), write, temps)
                else:
                    self._fill_e4m3(name, next(group), write, temps)
        self.bases.filled(name)

    def _pieces(self, span: Span) -> Iterator[tuple[int, int]]:
        """The beginning of each piece in the span, and its elements."""
        for start in range(0, span.size, self._piece):
            yield start, min(self._piece, span.size - start)

    def _put(self, name: str, region: Region, made: Tensor, first: int = 0) -> None:
        """Keep what of a region from this byte of it on is `made`, as far as it is this rank's."""
        packed, begin = self.bases.packed[name], region.offset + first
        own = self.bases.first_byte(name)
        low, high = max(begin, own), min(begin + made.nbytes, own + packed.nbytes)
        if low < high:
            raw = Tensor(made.name, (made.nbytes,), U8, made.storage, made.offset)
            self.dev.copy(packed.rows(low - own, high - own), raw.rows(low - begin, high - begin))

    def _fill_e4m3(self, name: str, span: Span, write: Write, temps: _Scratch) -> None:
        """One scale, from the largest value of the matrix."""
        dev, tensors = self.dev, span.tensors
        largest, scale = temps.number(0), temps.number(1)
        dev.zero(largest)
        for start, count in self._pieces(span):
            write(temps.x.rows(0, count), span.first + start)
            abs_max.abs_max(dev, largest, temps.x.rows(0, count))
        made = temps.codes.view_as(E4M3)
        for start, count in self._pieces(span):
            x, codes = temps.x.rows(0, count), made.rows(0, count)
            if span.size > self._piece:  # else it is still there
                write(x, span.first + start)
            quantize.quantize(dev, codes, None, scale, x, largest)
            self._put(name, tensors["codes"], codes, start)
        self._put(name, tensors["scale"], scale)

    def _fill_int8(self, name: str, span: Span, write: Write, temps: _Scratch) -> None:
        """A scale for each row: pieces of whole rows."""
        columns, tensors = span.param.columns, span.tensors
        rows = span.size // columns
        step = max(self._piece // columns // ROWS * ROWS, ROWS)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            start, size = first * columns, count * columns
            x, codes = temps.x.rows(0, size), temps.codes.view_as(I8).rows(0, size)
            scales = temps.scales.rows(0, count)
            write(x, span.first + start)
            shape = (count, columns)
            quantize_int8.rows(self.dev, codes.view(*shape), scales, x.view(*shape))
            self._put(name, tensors["codes"], codes, start)
            self._put(name, tensors["scale"], scales, first * scales.dtype.itemsize)

    def _fill_nf4(self, name: str, spans: list[Span], write: Write, temps: _Scratch) -> None:
        largest = [self._nf4_of(name, span, write, temps) for span in spans]
        # Each block has an element of level 1 or -1: the largest scale is the largest value.
        scale = max(LEAST_ABS_MAX, *largest) / np.float32(E4M3_MAX)
        self.dev.upload(temps.number(1), np.array([scale], np.float32))
        self._put(name, spans[0].tensors["scale"], temps.number(1))

    def _nf4_of(self, name: str, span: Span, write: Write, temps: _Scratch) -> np.float32:
        """Returns the largest scale. Scales wait here for their mean, which is that of all."""
        dev, tensors = self.dev, span.tensors
        found = np.zeros(span.size // BLOCK, np.float32)
        for start, count in self._pieces(span):
            half, blocks, _ = nf4.sizes(count)
            codes, scales = temps.codes.rows(0, half), temps.scales.rows(0, blocks)
            write(temps.x.rows(0, count), span.first + start)
            nf4.quantize(dev, codes, scales, temps.x.rows(0, count))
            self._put(name, tensors["codes"], codes, start // 2)
            found[start // BLOCK :][:blocks] = dev.download(scales)
        mean, largest = temps.number(0), np.float32(0)
        dev.upload(mean, found.mean(dtype=np.float64, keepdims=True).astype(np.float32))
        self._put(name, tensors["mean"], mean)
        for start, count in self._pieces(span):
            _, blocks, num_groups = nf4.sizes(count)
            codes, scales = temps.codes.rows(0, blocks), temps.scales.rows(0, blocks)
            groups, first = temps.groups.rows(0, num_groups), start // BLOCK
            dev.upload(scales, found[first : first + blocks])
            nf4.quantize_scales(dev, codes, groups, scales, mean, self.bases.levels)
            self._put(name, tensors["scale_codes"], codes, first)
            self._put(name, tensors["groups"], groups, first // GROUP * groups.dtype.itemsize)
            largest = max(largest, self._largest(codes, groups, mean))
        return largest

    def _largest(self, codes: Tensor, groups: Tensor, mean: Tensor) -> np.float32:
        """The largest scale of these blocks, as it is decoded."""
        codes, groups, mean = (self.dev.download(tensor) for tensor in (codes, groups, mean))
        of_blocks = groups[np.arange(len(codes)) // GROUP]
        return np.abs(scale_levels()[codes] * of_blocks + mean[0]).max()
