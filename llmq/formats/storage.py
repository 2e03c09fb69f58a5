"""Layout of frozen matrices as codes with scales, and their encoding while weights are read.

    e4m3         | codes | scale |
    e4m3-blocks  | a run of modules: codes, scales | ...
    int8         | codes | a scale for each row |
    mxfp4        | codes | exponents |
    nf4          | scale of fp8 codes | a run of modules: codes, scales' codes, groups, means | ...
    nvfp4        | a run of modules: codes, scales, factors | ...

All tensors of a block form one run of bytes. A rank's shard, a gathered part or a streamed part is
a range of these bytes, which may begin and end inside a tensor.
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

ALIGN = 256  # bytes to which tensors are aligned, for the fastest products, and ranks' shards
PIECE = 1 << 22  # elements encoded at a time, a multiple of the elements of a group of NF4 scales
ROWS = 16  # rows of a tile of INT8 codes, and the least number of columns of a matrix
NUMBER = 4  # distance between two stored numbers in F32 elements: 16 bytes

Write = Callable[[Tensor, int], None]
"""Function (tensor, first) that copies the matrix's elements from number `first` on into tensor
(n,)."""
Put = Callable[[str, Tensor, int], None]
"""Function (name, tensor, byte) that stores `tensor` in the matrix's tensor `name`, from `byte`
on."""
CodesOf = Callable[[HfPart], Mapping[str, Iterator[np.ndarray]] | None]
"""Function (part) that returns a module's codes from the checkpoint file: iterators over pieces of
each tensor, by name. The result is None if the file has no codes of the matrix's format."""
StorageLayout = dict[str, tuple[tuple[int, ...], DType]]
"""Shape and dtype of each tensor that stores a matrix, by tensor name."""


class Frozen(Protocol):
    """A frozen matrix; the class `Param` of the weight table has these attributes."""

    key: str
    shape: tuple[int, ...]
    size: int
    columns: int
    hf: tuple[HfPart, ...]


class Run(NamedTuple):
    """Adjacent modules of one size, such as experts, whose tensors are stored together. first: the
    matrix element at which the run begins. size: number of elements of one module."""

    first: int
    size: int
    parts: tuple[HfPart, ...]

    @property
    def count(self) -> int:
        return len(self.parts)

    def of(self, x: Tensor) -> Tensor:
        """Return the run's elements of the matrix x, flattened."""
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
    """Return how many elements of a matrix of `size` elements are encoded at a time."""
    return min(PIECE, size)


class Region(NamedTuple):
    """The place of a tensor inside a block's bytes. offset: the tensor's first byte."""

    offset: int
    shape: tuple[int, ...]
    dtype: DType


class CodeLayout:
    """The places of the tensors that store a block's matrices. nbytes: bytes of all tensors,
    rounded up to a multiple of ALIGN for each rank. regions: the place of a tensor, by matrix key
    and tensor name."""

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
        """Return the tensors that store a matrix, by name. packed: U8, the bytes of the block."""
        return {
            name: Tensor(name, shape, dtype, packed.storage, packed.offset + offset)
            for name, (offset, shape, dtype) in self.regions[key].items()
        }


class Encoder:
    """Scratch memory in which matrices are encoded one after another, in pieces. The constructor
    allocates the scratch once, so that memory plans count the scratch. matrix: the matrix to
    encode. put: function that stores the tensors of the matrix. codes: U8, one code for each
    element of a piece. scales: F32, one scale for ROWS elements. groups: F32, one number for GROUP
    scales."""

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
        """Prepare to encode `matrix`, as the context of a `with` statement. write: copies the
        matrix's elements, in dtype F32 or BF16. put: stores tensors. codes_of: returns a module's
        codes from the file, if the file has codes of this format."""
        with self._scratch(dtype):
            self.matrix, self.put, self._write, self._loaded = matrix, put, write, (0, 0)
            self._codes_of = codes_of
            yield self

    def copied(self, number: int, run: Run, index: int, nbytes: Mapping[str, int]) -> bool:
        """Store a module's codes from the file; return False if the file has no codes. number:
        number of the run; the run's tensors are called NAME.number. index: index of the module in
        the run. nbytes: bytes of a module's tensors, by name."""
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
        """Return scratch for one number, F32 (1,). index: 0 or 1, which of two numbers."""
        return self._numbers.rows(NUMBER * index, NUMBER * index + 1)

    def pieces(self, size: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """Yield (first element, number of elements) for each piece of `size` elements. All numbers
        but the last are multiples of `multiple`."""
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
    """The base class of number formats of frozen matrices; each format's file has a subclass. dev:
    the device that makes, decodes or multiplies codes."""

    def __init__(self, dev: Device):
        self.dev = dev

    def layout(self, matrix: Frozen) -> StorageLayout:
        """Return the shapes and dtypes of the tensors that store a matrix."""
        raise NotImplementedError

    def piece(self, matrix: Frozen) -> int:
        """Return the number of elements of the matrix that are encoded at a time."""
        return piece_of(matrix.size)

    def start(self, matrices: Iterable[Frozen], *, multiplied: bool) -> None:
        """Allocate the tables of a format before the first matrix is encoded. multiplied: True if
        products read the stored codes."""

    def encode(self, encoder: Encoder) -> None:
        """Read the encoder's matrix in pieces, and store the matrix's codes and scales."""
        raise NotImplementedError

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        """Decode a stored matrix into out, which has the matrix's shape. kept: the tensors that
        store the matrix. scale: receives the scale of out, F32 (1,), if out is E4M3; else None."""
        raise NotImplementedError

    def weight(self, kept: Mapping[str, Tensor], transposed: Tensor) -> Operand:
        """Return a stored matrix as an operand of products. transposed: transposed codes (..., in,
        out)."""
        raise NotImplementedError

    def has_coded(self, matrix: Frozen) -> bool:
        """Return True if the method `coded` supports the matrix."""
        return False

    def coded(self, matrix: Frozen, kept: Mapping[str, Tensor]) -> Operand:
        """Return the operand of a stored matrix for products of few rows; such a product decodes
        the codes."""
        raise NotImplementedError

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        """Return the elements x (n,) after encoding and decoding with the NumPy reference; F32
        (n,)."""
        raise NotImplementedError
