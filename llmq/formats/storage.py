"""How frozen matrices lie as codes with scales, and what makes them while they are read.

    e4m3    | codes | scale |
    int8    | codes | a scale for each row |
    nf4     | scale of fp8 codes | of modules of one size: codes, codes of scales, groups, means |

A block's are one run of bytes. A rank's part of it, and the parts that are gathered and streamed,
are parts of these bytes, wherever a tensor ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np

from llmq.arch.matrix import HfPart
from llmq.base.dtypes import F32, U8, DType
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.ref.quantize.four_bits import GROUP
from llmq.runtime.arena import align_up
from llmq.runtime.device import Device

ALIGN = 256  # bytes, of tensors as in an arena, for the fastest products; and of each rank's part
PIECE = 1 << 22  # elements on the device at a time: whole groups of NF4's scales
ROWS = 16  # of INT8 codes that are made at once, and their least number of columns
NUMBER = 4  # elements of F32 from one number to the next, 16 bytes

Write = Callable[[Tensor, int], None]
"""Fills a tensor (n,) with the elements of a matrix from this one on."""
Put = Callable[[str, Tensor, int], None]
"""Keeps one of a matrix's tensors, by its name, from this byte of it on."""
StorageLayout = dict[str, tuple[tuple[int, ...], DType]]
"""Shape and format of the tensors that a matrix is kept as, by their names."""


class Frozen(Protocol):
    """A frozen matrix, as the weight table has it (`Param`)."""

    key: str
    shape: tuple[int, ...]
    size: int
    columns: int
    hf: tuple[HfPart, ...]


def piece_of(size: int) -> int:
    """How many of so many elements are encoded at a time."""
    return min(PIECE, size)


class Region(NamedTuple):
    """A tensor inside of a block's bytes, at this offset."""

    offset: int
    shape: tuple[int, ...]
    dtype: DType


class CodeLayout:
    """The places of a block's matrices' tensors. nbytes: of all, a multiple of ALIGN a rank.
    regions: by key and name."""

    def __init__(self, matrices: Mapping[str, StorageLayout], shards: int = 1):
        """matrices: the layout of each matrix, by key."""
        self.regions: dict[str, dict[str, Region]] = {}
        used = 0
        for key, tensors in matrices.items():
            self.regions[key] = {}
            for name, (shape, dtype) in tensors.items():
                region = Region(align_up(used, ALIGN), shape, dtype)
                self.regions[key][name] = region
                used = region.offset + math.prod(shape) * dtype.itemsize
        self.nbytes = align_up(used, ALIGN * shards)

    def tensors(self, packed: Tensor, key: str) -> dict[str, Tensor]:
        """A matrix's, in bytes that begin with those of the block."""
        return {
            name: Tensor(name, shape, dtype, packed.storage, packed.offset + offset)
            for name, (offset, shape, dtype) in self.regions[key].items()
        }


class Encoder:
    """Scratch for the codes of one matrix after the other, and for pieces of it. It is taken once
    when this is made, so that plans know of it. matrix: that of which codes are made, and put: what
    keeps them. codes: U8, one for each element of a piece. scales: F32, one for ROWS elements.
    groups: F32, one for GROUP scales."""

    matrix: Frozen
    put: Put

    def __init__(self, dev: Device, pieces: Iterable[int]):
        """pieces: of each matrix, as of `Storage.piece`."""
        self.dev, self._piece = dev, max(pieces)
        with self._scratch(F32):
            pass

    @contextmanager
    def _scratch(self, dtype: DType) -> Iterator[None]:
        take, n = self.dev.scratch, self._piece
        blocks = -(-n // ROWS)  # no row is shorter, nor is a block of NF4
        with (
            take("base.x", (n,), dtype) as self._x,
            take("base.codes", (n,), U8) as self.codes,
            take("base.scales", (blocks,), F32) as self.scales,
            take("base.groups", (-(-blocks // GROUP),), F32) as self.groups,
            take("base.numbers", (2 * NUMBER,), F32) as self._numbers,
        ):
            yield

    @contextmanager
    def of(self, matrix: Frozen, write: Write, dtype: DType, put: Put) -> Iterator[Encoder]:
        """write, dtype: of the elements as they are read, F32 or BF16."""
        with self._scratch(dtype):
            self.matrix, self.put, self._write, self._there = matrix, put, write, (0, 0)
            yield self

    def number(self, index: int) -> Tensor:
        """One of two, F32 (1,)."""
        return self._numbers.rows(NUMBER * index, NUMBER * index + 1)

    def pieces(self, size: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """First element and count of parts of so many elements, all but the last multiples."""
        step = self._piece // multiple * multiple
        for first in range(0, size, step):
            yield first, min(step, size - first)

    def read(self, first: int, count: int) -> Tensor:
        """The matrix's elements from this one on, F32 or BF16 (count,)."""
        x = self._x.rows(0, count)
        if self._there != (first, count):
            self._write(x, first)
            self._there = first, count
        return x


class Storage:
    """The way in which frozen matrices are kept in one number format, a class in each format's
    file. dev: the device on which codes are made, and decoded before products or multiplied."""

    def __init__(self, dev: Device):
        self.dev = dev

    def layout(self, matrix: Frozen) -> StorageLayout:
        """The tensors that a matrix is kept as."""
        raise NotImplementedError

    def piece(self, matrix: Frozen) -> int:
        """The number of elements that are encoded at a time."""
        return piece_of(matrix.size)

    def start(self, matrices: Iterable[Frozen], *, multiplied: bool) -> None:
        """Allocate the tables of a format before the first matrix is encoded. multiplied: whether
        products read matrices as they are kept."""

    def encode(self, made: Encoder) -> None:
        """Read a matrix in pieces, and put its tensors."""
        raise NotImplementedError

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        """out, of the matrix's shape, from its tensors. scale: F32 (1,) out, if out is of e4m3."""
        raise NotImplementedError

    def weight(self, kept: Mapping[str, Tensor], transposed: Tensor) -> Operand:
        """The operand that a product reads of a matrix. transposed: its codes (..., in, out)."""
        raise NotImplementedError

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        """The elements x (n,) of a matrix encoded and decoded, F32 (n,), by the references."""
        raise NotImplementedError
