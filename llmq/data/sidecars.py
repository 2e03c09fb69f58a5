"""Columns of named step inputs beside token files: one element for each token of a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from llmq.base.errors import DataError
from llmq.base.files import open_file, read_errors
from llmq.base.step_inputs import SCORES, WEIGHTS, Input
from llmq.data.checksums import ARRAY_SUFFIX
from llmq.data.scores import ScoreFile, scores_path
from llmq.data.tokens import TokenFile


class _Header(NamedTuple):
    shape: tuple[int, ...]
    by_columns: bool
    dtype: np.dtype


class Column(Protocol):
    """Column of an input for the tokens of a file. One thread uses a column."""

    def read(self, start: int, count: int) -> np.ndarray:
        """Elements (count, ...) of the tokens [start, start + count). DataError if damaged."""

    def close(self) -> None: ...


class _Weights:
    """Column of the weights in a token file; the file's mask bits if it has no weights."""

    def __init__(self, file: TokenFile) -> None:
        self.read = file.read_weights

    def close(self) -> None:
        """Nothing to close: another object owns the token file."""


class ArrayFile:
    """`.npy` file with one element of an input for each token of a file."""

    def __init__(self, of: Input, file: TokenFile) -> None:
        """Open the array of input `of` beside a token file. DataError for a missing array, or
        another shape, dtype or order."""
        self.path = path = array_path(file.path, of.name)
        wanted, dtype = (file.num_tokens, *of.shape), of.dtype.numpy
        try:
            self._file = open_file(path)
        except FileNotFoundError:
            raise DataError(
                f"there is no '{path}': the loss or the model reads {of.name} of each token, "
                f"{dtype} {wanted}: write the file with np.save"
            ) from None
        try:
            header = _read_header(self._file)
        except (OSError, ValueError) as error:
            self.close()
            raise DataError(f"cannot read '{path}': {error}") from error
        # NumPy names the dtypes of ml_dtypes, such as bfloat16, by their size alone.
        names = (dtype, np.dtype(f"V{dtype.itemsize}")) if dtype.kind == "V" else (dtype,)
        if header.shape != wanted or header.dtype not in names or (header.by_columns and of.shape):
            self.close()
            raise DataError(
                f"'{path}' holds {header.dtype} {header.shape}, and {of.name} of the tokens of "
                f"'{file.path}' is {dtype} {wanted} in C order"
            )
        self._record, self._begin = np.dtype((dtype, of.shape)), self._file.tell()

    def read(self, start: int, count: int) -> np.ndarray:
        """Elements (count, ...) of the tokens [start, start + count). DataError if truncated."""
        out = np.empty(count, self._record)
        with read_errors(self.path):
            offset = self._begin + self._record.itemsize * start
            got = os.preadv(self._file.fileno(), (out.view(np.uint8),), offset)
        if got != out.nbytes:
            raise DataError(f"'{self.path}' is truncated: write the file again")
        return out

    def close(self) -> None:
        self._file.close()


def _read_header(file: BinaryIO) -> _Header:
    """Header of a `.npy` file, read up to the elements. ValueError for another file."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return _Header(*np.lib.format.read_array_header_1_0(file))
    return _Header(*np.lib.format.read_array_header_2_0(file))


def array_path(token_file: Path, name: str) -> Path:
    """Path of a token file's array of this name: X.NAME.npy for X.bin."""
    return token_file.with_name(f"{token_file.name.removesuffix('.bin')}.{name}{ARRAY_SUFFIX}")


def column_path(of: Input, token_file: Path, scores: Path | None) -> Path:
    """Path of the file with an input's column for a token file. scores: as in open_column."""
    if of.sidecar == SCORES:
        return scores_path(scores, token_file)
    return token_file if of.sidecar == WEIGHTS else array_path(token_file, of.name)


def open_column(of: Input, file: TokenFile, scores: Path | None) -> Column:
    """Column of an input for a token file. scores: folder of `.scores` files. DataError for a
    column that is missing or damaged, or that belongs to other tokens."""
    if of.sidecar == WEIGHTS:
        return _Weights(file)
    if of.sidecar == SCORES:
        column = ScoreFile(scores_path(scores, file.path))
        column.check(file, of.shape[0] // 2 if of.shape else 0)
        return column
    return ArrayFile(of, file)
