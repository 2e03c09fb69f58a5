"""The `.docs` file beside a token file: ends of documents.

    offset 0     8 bytes  b"BIN.DOC\\n"
           8     int32    version, 1; 2 = documents come in pairs, the second behind the first
          12     int32    1 = the last document is cut, and continues in another token file
          16     int64    number of tokens of the token file
          24     int64    number of documents n
          32     uint32   CRC-32 of some tokens of the token file (`sample_checksum`)
          36     filler   up to 64 bytes: "*", then a newline
          64     n int64  the position behind each document's last token, rising

The first token of a document is never a target, so its mask bit is free. In a pair this bit is set
in the preferred document; with labels both bits are the pair's label, and the second document has
the answer of another pair. All numbers are little-endian. `train.docs` belongs to `train.bin`; the
header of `train.bin` does not name the `.docs` file, because other programs read token files too.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from llmq.base.errors import DataError
from llmq.base.files import check_readable, disk_errors, open_file, read_errors

MAGIC = b"BIN.DOC\n"
VERSION, IN_PAIRS = 1, 2
HEADER_BYTES = 64
SUFFIX = ".docs"
_FIELDS = struct.Struct("<8s2i2qI")
_END = np.dtype("<i8")
_SAMPLES = 32  # tokens that distinguish token files of the same length


def documents_path(token_file: Path) -> Path:
    """Path of a token file's `.docs` file: X.docs for X.bin."""
    return token_file.with_name(token_file.name.removesuffix(".bin") + SUFFIX)


def has_pairs(token_file: Path) -> bool:
    """True if the `.docs` file of a token file says that documents come in pairs; False without
    the file. ConfigError for a pipe or a device."""
    try:
        with open_file(documents_path(token_file)) as file:
            header = file.read(_FIELDS.size)
    except OSError:
        return False
    return len(header) == _FIELDS.size and _FIELDS.unpack(header)[:2] == (MAGIC, IN_PAIRS)


def partial_path(path: Path) -> Path:
    """Path of a file until the file is complete."""
    return path.with_name(path.name + ".partial")


def sample_checksum(read_tokens: Callable[[int, int], np.ndarray], ends: np.ndarray) -> int:
    """CRC-32 of a few tokens, at ends of documents and at equal distances, to recognize another
    file of the same length. read_tokens: function of (start, count) that returns ids, int32
    (count,)."""
    if not len(ends):
        return 0
    chosen = np.linspace(0, len(ends) - 1, min(len(ends), _SAMPLES)).astype(np.int64)
    evenly = np.linspace(0, ends[-1] - 1, _SAMPLES).astype(np.int64)
    places = np.unique(np.concatenate([ends[chosen] - 1, evenly]))
    tokens = [read_tokens(int(place), 1) for place in places]
    return zlib.crc32(np.concatenate(tokens).astype("<i4").tobytes())


class DocumentFile(NamedTuple):
    """Content of a `.docs` file, not yet compared with the token file. ends: int64 (n,), position
    behind each document's last token. is_cut: True if the last document continues in another file.
    num_tokens: number of tokens of the token file. checksum: `sample_checksum` of the token file.
    in_pairs: True if every two documents are a pair."""

    ends: np.ndarray
    is_cut: bool
    num_tokens: int
    checksum: int
    in_pairs: bool


def read_document_file(path: Path, verify: Callable[[bytes, Path], None] | None) -> DocumentFile:
    """Content of a `.docs` file. verify: function of (bytes, path) that raises DataError for a
    wrong checksum; None: no check. DataError for a damaged file."""
    with read_errors(path):
        check_readable(path)
        data = path.read_bytes()
    if not data.startswith(MAGIC) or len(data) < HEADER_BYTES:
        raise DataError(
            f"'{path}' does not say where documents are: it starts with {data[:8]!r} instead "
            f"of {MAGIC!r} and a header; remove it, or tokenize the data again"
        )
    _, version, is_cut, num_tokens, count, checksum = _FIELDS.unpack_from(data)
    expected, problem = HEADER_BYTES + _END.itemsize * count, ""
    if version not in (VERSION, IN_PAIRS):
        problem = f"has version {version}; versions {VERSION} and {IN_PAIRS} can be read"
    elif len(data) != expected:
        problem = "is truncated" if len(data) < expected else "is too long"
        problem += f": {len(data)} bytes, but its header says {count} documents = {expected} bytes"
    if problem:
        raise DataError(f"'{path}' {problem}: copy it again, or tokenize the data again")
    if verify is not None:
        verify(data, path)
    ends = np.frombuffer(data, _END, offset=HEADER_BYTES).astype(np.int64, copy=False)
    return DocumentFile(ends, is_cut == 1, num_tokens, checksum, version == IN_PAIRS)


class PartialFile:
    """A file that is written piece by piece under `partial_path`, and renamed to `path` when it is
    complete. beside: other partial files that are synced and closed together with this one."""

    path: Path
    beside: Sequence[PartialFile] = ()
    _file: BinaryIO

    def _begin(self, keep: int) -> None:
        """Open the partial file behind the first `keep` bytes, and drop the rest; 0: a new file.
        DataError for a shorter file."""
        partial = partial_path(self.path)
        with disk_errors(partial):
            if keep and (not partial.exists() or partial.stat().st_size < keep):
                raise DataError(
                    f"'{partial}' is missing or too short: start again with --overwrite"
                )
            self._file = open(partial, "r+b" if keep else "wb")  # noqa: SIM115 (kept open)
            self._file.truncate(keep)
            self._file.seek(keep)

    def sync(self) -> None:
        """Force all written bytes to the disk."""
        with disk_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
        for other in self.beside:
            other.sync()

    def suspend(self) -> None:
        """Close the partial file, which a later process may resume."""
        for file in (self, *self.beside):
            file._file.close()

    def discard(self) -> None:
        self.suspend()
        for file in (self, *self.beside):
            Path(file._file.name).unlink(missing_ok=True)


class DocumentWriter(PartialFile):
    """Writer of a `.docs` file, beside the writer of its token file. Only the last end is in
    memory."""

    def __init__(self, path: Path, keep_tokens: int = 0, in_pairs: bool = False) -> None:
        """keep_tokens: number of tokens to keep of a partial file; later ends are dropped."""
        self.path, self._version = path, IN_PAIRS if in_pairs else VERSION
        kept = _ends_upto(partial_path(path), keep_tokens)
        # Number of ends so far, and the last end.
        self.count, self.last = len(kept), int(kept[-1]) if len(kept) else 0
        self._begin(HEADER_BYTES + kept.nbytes if keep_tokens else 0)
        with disk_errors(path):
            self._file.seek(0)
            self._file.write(self._header(0, 0, is_cut=False))
            self._file.seek(0, os.SEEK_END)

    def _header(self, num_tokens: int, checksum: int, *, is_cut: bool) -> bytes:
        fields = (MAGIC, self._version, int(is_cut), num_tokens, self.count, checksum)
        return _FIELDS.pack(*fields).ljust(HEADER_BYTES - 1, b"*") + b"\n"

    def add(self, ends: np.ndarray) -> None:
        """Add the ends of documents: positions (k,), rising. Empty documents are dropped."""
        ends = np.asarray(ends, _END)
        ends = ends[np.diff(ends, prepend=self.last) > 0]
        with disk_errors(self.path):
            self._file.write(ends.tobytes())
        self.count += len(ends)
        self.last = int(ends[-1]) if len(ends) else self.last

    def close(self, num_tokens: int, read_tokens: Callable[[int, int], np.ndarray]) -> None:
        """Complete and rename the file. num_tokens: number of tokens of the token file.
        read_tokens: its reader, as in `sample_checksum`."""
        is_cut = self.last < num_tokens
        self.add(np.array([num_tokens]))
        with disk_errors(self.path), self._file:
            self.sync()
            ends = np.fromfile(partial_path(self.path), _END, offset=HEADER_BYTES)
            self._file.seek(0)
            self._file.write(
                self._header(num_tokens, sample_checksum(read_tokens, ends), is_cut=is_cut)
            )
            self.sync()
        os.replace(partial_path(self.path), self.path)


def _ends_upto(partial: Path, tokens: int) -> np.ndarray:
    """Ends of documents among the first tokens of a partial file, int64 (k,)."""
    if not tokens:
        return np.empty(0, _END)
    with read_errors(partial):
        data = partial.read_bytes()
    ends = data[HEADER_BYTES:]
    ends = np.frombuffer(ends[: len(ends) // _END.itemsize * _END.itemsize], _END)
    if _FIELDS.unpack_from(data.ljust(HEADER_BYTES))[2] == 1:  # complete: `close` added an end
        ends = ends[:-1]
    return ends[ends <= tokens]
