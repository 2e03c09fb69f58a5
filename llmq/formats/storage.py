"""Layout of frozen matrices as codes with scales, and their encoding while weights are read.

    e4m3         | codes | scale |
    e4m3-blocks  | a run of modules: codes, scales | ...
    int8         | codes | a scale for each row |
    mxfp4        | codes | exponents |
    nf4          | scale of fp8 codes | a run of modules: codes, scales' codes, groups, means | ...
    nvfp4        | a run of modules: codes, scales, factors | ...

All tensors of a block form one run of bytes. Ranks' shards, gathered parts and streamed parts are
ranges of these bytes, which may begin and end inside a tensor.
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

ALIGN = 256  # bytes: alignment of tensors, for the fastest products, and of ranks' shards
PIECE = 1 << 22  # elements encoded at a time: a whole number of groups of NF4's scales
ROWS = 16  # rows of a tile of INT8 codes, and the least number of columns
NUMBER = 4  # F32 elements from one number to the next: 16 bytes

Write = Callable[[Tensor, int], None]
"""Function (tensor, first) that fills tensor (n,) with the matrix's elements from `first` on."""
Put = Callable[[str, Tensor, int], None]
"""Function (name, tensor, byte) that stores `tensor` as the part of the matrix's tensor `name` from
`byte` on."""
CodesOf = Callable[[HfPart], Mapping[str, Iterator[np.ndarray]] | None]
"""Function that returns by name, in pieces, the tensors that a file has for a module's codes; None
if the file has no codes of the matrix's format."""
StorageLayout = dict[str, tuple[tuple[int, ...], DType]]
"""Shape and dtype of the tensors that store a matrix, by name."""


class Frozen(Protocol):
    """A frozen matrix; the weight table's `Param` is one."""

    key: str
    shape: tuple[int, ...]
    size: int
    columns: int
    hf: tuple[HfPart, ...]


class Run(NamedTuple):
    """Adjacent modules of one size, such as experts, whose tensors lie together. first: element of
    the matrix at which the run begins. size: number of elements of one module."""

    first: int
    size: int
    parts: tuple[HfPart, ...]

    @property
    def count(self) -> int:
        return len(self.parts)

    def of(self, x: Tensor) -> Tensor:
        """Return the run's elements of a matrix, flat."""
        return x.view(x.size).rows(self.first, self.first + self.count * self.size)


def runs_of(matrix: Frozen) -> list[Run]:
    runs: list[Run] = []
    for part in matrix.hf:
        first, size = part.start * matrix.columns, (part.stop - part.start) * matrix.columns
        run = runs[-1] if runs else None
        if run and run.size == size and run.first + run.count * size == first:
            runs[-1] = run._replace(parts=(*run.parts, part))
        else:
            runs.append(Run(first, size, (part,)))
    return runs


def piece_of(size: int) -> int:
    """Return the number of elements encoded at a time, out of `size`."""
    return min(PIECE, size)


class Region(NamedTuple):
    """A tensor inside a block's bytes. offset: the tensor's first byte."""

    offset: int
    shape: tuple[int, ...]
    dtype: DType


class CodeLayout:
    """Places of the tensors of a block's matrices. nbytes: bytes of all tensors, a multiple of
    ALIGN for each rank. regions: place of a tensor, by a matrix's key and a tensor's name."""

    def __init__(self, matrices: Mapping[str, StorageLayout], shards: int = 1):
        """matrices: the tensors of each matrix, by key. shards: number of ranks."""
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
        """Return a matrix's tensors by name. packed: U8, from the block's first byte on."""
        return {
            name: Tensor(name, shape, dtype, packed.storage, packed.offset + offset)
            for name, (offset, shape, dtype) in self.regions[key].items()
        }


class Encoder:
    """Scratch for encoding one matrix after another, in pieces. The constructor takes the scratch
    once, so that plans count the memory. matrix: the matrix to encode. put: stores the matrix's
    tensors. codes: U8, one code for each element of a piece. scales: F32, one scale for ROWS
    elements. groups: F32, one number for GROUP scales."""

    matrix: Frozen
    put: Put

    def __init__(self, dev: Device, pieces: Iterable[int]):
        """pieces: elements encoded at a time, for each matrix (`Storage.piece`)."""
        self.dev, self._piece = dev, max(pieces)
        with self._scratch(F32):
            pass

    @contextmanager
    def _scratch(self, dtype: DType) -> Iterator[None]:
        take, n = self.dev.scratch, self._piece
        blocks = -(-n // ROWS)  # no format has a scale for fewer than ROWS elements
        with (
            take("base.x", (n,), dtype) as self._x,
            take("base.codes", (n,), U8) as self.codes,
            take("base.scales", (blocks,), F32) as self.scales,
            take("base.groups", (-(-blocks // GROUP),), F32) as self.groups,
            take("base.numbers", (2 * NUMBER,), F32) as self._numbers,
        ):
            yield

    @contextmanager
    def of(
        self, matrix: Frozen, write: Write, dtype: DType, put: Put, codes_of: CodesOf
    ) -> Iterator[Encoder]:
        """Prepare to encode `matrix` in a with block. write: writes the matrix's elements, in dtype
        F32 or BF16. put: stores tensors. codes_of: returns codes of modules that need no
        encoding."""
        with self._scratch(dtype):
            self.matrix, self.put, self._write, self._loaded = matrix, put, write, (0, 0)
            self._codes_of = codes_of
            yield self

    def copied(self, number: int, run: Run, index: int, nbytes: Mapping[str, int]) -> bool:
        """Store a module's codes from its file; return False if the file has no codes. number:
        number of the run, whose tensors are called NAME.number. index: index of the module in the
        run. nbytes: bytes of a module's tensors, by name."""
        tensors = self._codes_of(run.parts[index])
        if tensors is None:
            return False
        for name, pieces in tensors.items():
            at = index * nbytes[name]
            for piece in pieces:
                content = piece.reshape(-1).view(np.uint8)
                for start in range(0, content.size, self.codes.size):
                    part = content[start : start + self.codes.size]
                    target = self.codes.rows(0, part.size)
                    self.dev.upload(target, part)
                    self.put(f"{name}.{number}", target, at + start)
                at += content.size
        return True

    def number(self, index: int) -> Tensor:
        """Return scratch for one number, F32 (1,). index: 0 or 1."""
        return self._numbers.rows(NUMBER * index, NUMBER * index + 1)

    def pieces(self, size: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """Yield (first, count) of each piece of `size` elements. All counts but the last are
        multiples of `multiple`."""
        step = self._piece // multiple * multiple
        for first in range(0, size, step):
            yield first, min(step, size - first)

    def read(self, first: int, count: int) -> Tensor:
        """Return `count` elements of the matrix from `first` on, F32 or BF16 (count,)."""
        x = self._x.rows(0, count)
        if self._loaded != (first, count):
            self._write(x, first)
            self._loaded = first, count
        return x


class Storage:
    """Base class of the number formats of frozen matrices, with a subclass in each format's file.
    dev: the device that makes, decodes or multiplies codes."""

    def __init__(self, dev: Device):
        self.dev = dev

    def layout(self, matrix: Frozen) -> StorageLayout:
        """Return shapes and dtypes of the tensors that store a matrix."""
        raise NotImplementedError

    def piece(self, matrix: Frozen) -> int:
        """Return the number of elements of the matrix that are encoded at a time."""
        return piece_of(matrix.size)

    def start(self, matrices: Iterable[Frozen], *, multiplied: bool) -> None:
        """Allocate the tables of a format before the first matrix is encoded. multiplied: True if
        products read the stored codes."""

    def encode(self, encoder: Encoder) -> None:
        """Read the encoder's matrix in pieces, and store its tensors."""
        raise NotImplementedError

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        """Decode a stored matrix to out, of the matrix's shape. kept: the tensors that store the
        matrix. scale: out, F32 (1,), if out is E4M3; else None."""
        raise NotImplementedError

    def weight(self, kept: Mapping[str, Tensor], transposed: Tensor) -> Operand:
        """Return the operand of a stored matrix. transposed: transposed codes (..., in, out)."""
        raise NotImplementedError

    def has_coded(self, matrix: Frozen) -> bool:
        """True if `coded` supports the matrix."""
        return False

    def coded(self, matrix: Frozen, kept: Mapping[str, Tensor]) -> Operand:
        """Return the operand of a stored matrix for products of few rows, which decode the codes
        themselves."""
        raise NotImplementedError

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        """Return the elements x (n,), encoded and decoded by the references; F32 (n,)."""
        raise NotImplementedError
