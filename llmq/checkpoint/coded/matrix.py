"""A matrix that is stored as codes with scales, and reads as one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmq.checkpoint.safetensors_file import SafetensorsFile
from llmq.ref.common import row_blocks

PIECE = 1 << 20  # elements that are read at once: they stay in the processor's cache


class Stored(Protocol):
    """A tensor of a file, by its name there."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def check_length(self) -> None:
        """LlmqError if the file has become shorter."""


class CodedMatrix:
    """A tensor as the other ones of its file, with the values of codes, F32.

    path: of the codes' file. decode: rows [start, stop).
    """

    dtype = "F32"

    def __init__(
        self, codes: Stored, shape: tuple[int, ...], decode: Callable[[int, int], np.ndarray]
    ):
        self.path, self.shape, self._codes, self._decode = codes.path, shape, codes, decode

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """A few rows at a time: where they belong, and their values."""
        for rows in row_blocks(self.shape[0], prod(self.shape[1:]), PIECE):
            yield rows, self.rows(rows.start, rows.stop)

    def rows(self, start: int, stop: int, *, transposed: bool = False) -> np.ndarray:
        """These rows; transposed: these columns, as rows."""
        self._codes.check_length()
        if transposed:
            return self._decode(0, self.shape[0])[:, start:stop].T
        return self._decode(start, stop)


@lru_cache(maxsize=16)
def _open(path: Path, changed: int) -> SafetensorsFile:
    """changed: when the file was; another one has another header."""
    return SafetensorsFile(path)


def stored_values(tensor: Stored, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Elements [start, stop) of a stored tensor, flat, in its own format; FP8 too, which the
    library's NumPy side does not read."""
    return _open(tensor.path, tensor.path.stat().st_mtime_ns).read(tensor.name, start, stop)


def scaled(codes: Stored, scales: Stored, block: tuple[int, int] | None) -> CodedMatrix:
    """A matrix (out, in) of numbers with a scale for each block of it; None: with one scale, or one
    for each row. The last blocks may be smaller."""
    out, columns = codes.shape
    factors = stored_values(scales).astype(np.float32)
    if block is None:
        block = (1, columns) if factors.size == out and scales.shape != (1,) else (out, columns)
    factors = factors.reshape(-(-out // block[0]), -(-columns // block[1]))

    def decode(start: int, stop: int) -> np.ndarray:
        values = stored_values(codes, start * columns, stop * columns).astype(np.float32)
        of_rows = factors[np.arange(start, stop) // block[0]]
        return values.reshape(-1, columns) * of_rows[:, np.arange(columns) // block[1]]

    return CodedMatrix(codes, codes.shape, decode)


def take(tensors: dict[str, Any], *endings: str) -> None:
    """Leave out the tensors whose names end so: what only products of codes need."""
    for name in [name for name in tensors if name.endswith(endings)]:
        del tensors[name]
