"""The `.sums` file beside a token file: checksums of its pieces, and of its `.docs` file.

    offset 0     8 bytes  b"BIN.SUM\n"
           8     int32    version, 2
          12     int32    bytes of a piece, a power of two; the last piece may have fewer
          16     int64    bytes of the token file
          24     int64    bytes of its `.docs` file; -1 without a `.docs` file
          32     uint64   XXH3 of the `.docs` file
          40     uint64   XXH3 of all bytes of this file from offset 56 on
          48     uint64   XXH3 of the first 48 bytes of this file
          56     n uint64 XXH3 of each piece of the token file

All numbers are little-endian; XXH3 has 64 bits and no seed. Pieces are small, because training
reads rows in a shuffled order.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest as sum_of

from llmq.base.errors import DataError
from llmq.base.files import check_readable, disk_errors, expand_pattern, read_errors, replacing
from llmq.data.document_file import SUFFIX as DOCUMENTS_SUFFIX
from llmq.data.document_file import documents_path

MAGIC = b"BIN.SUM\n"
VERSION = 2
SUFFIX = ".sums"
ARRAY_SUFFIX = ".npy"  # ending of arrays beside token files, see sidecars.py
PIECE_BYTES = 1 << 16
_FIELDS = struct.Struct("<8s2i2q2Q")  # the header without its own checksum, at offset 48
_SUM = np.dtype("<u8")
_of_thread = threading.local()  # its .buffer holds the last piece that a thread has read


def checksums_path(token_file: Path) -> Path:
    """Path of a token file's `.sums` file: X.sums for X.bin."""
    return token_file.with_name(token_file.name.removesuffix(".bin") + SUFFIX)


def write_checksums(token_file: Path, content: Path | None = None) -> None:
    """Write the `.sums` file of a token file and its `.docs` file. content: path of the token file
    until it is renamed to `token_file`; None: `token_file` itself. LlmqError if the disk fails."""
    with disk_errors(checksums_path(token_file)):
        with open(content or token_file, "rb", buffering=0) as file:
            pieces = iter(functools.partial(file.read, PIECE_BYTES), b"")
            sums = np.array([sum_of(piece) for piece in pieces], _SUM).tobytes()
            num_bytes = os.fstat(file.fileno()).st_size
        documents, docs, docs_bytes = documents_path(token_file), b"", -1
        if documents.exists():
            docs = documents.read_bytes()
            docs_bytes = len(docs)
    counts = (PIECE_BYTES, num_bytes, docs_bytes)
    head = _FIELDS.pack(MAGIC, VERSION, *counts, sum_of(docs), sum_of(sums))
    own = sum_of(head).to_bytes(_SUM.itemsize, "little")
    with replacing(checksums_path(token_file)) as file:
        file.write(head + own + sums)


class Checksums:
    """Checksums of a `.sums` file, and a record of the pieces that were compared. Threads may share
    an object: at worst two threads compare the same piece."""

    def __init__(self, path: Path, token_file: Path, num_bytes: int) -> None:
        """path: the `.sums` file. num_bytes: size of the token file. DataError if the `.sums` file
        is damaged, or belongs to a token file of another size."""
        self.path, self.token_file, self.num_bytes = path, token_file, num_bytes
        with read_errors(path):
            check_readable(path)
            data = path.read_bytes()
        if not data.startswith(MAGIC) or len(data) < len(MAGIC) + 4:
            raise self._wrong("is no file of checksums")
        (version,) = struct.unpack_from("<i", data, len(MAGIC))
        if version != VERSION:
            raise self._wrong(f"has version {version}, only {VERSION} can be read")
        at = _FIELDS.size + _SUM.itemsize
        head, own, sums = data[: _FIELDS.size], data[_FIELDS.size : at], data[at:]
        if len(data) < at or sum_of(head) != int.from_bytes(own, "little"):
            raise self._wrong("is damaged")
        _, _, piece, size, self._docs_bytes, self._docs, of_sums = _FIELDS.unpack(head)
        if sum_of(sums) != of_sums or piece.bit_count() != 1 or piece < 0:
            raise self._wrong("is damaged")
        if size != num_bytes or len(sums) != -(-size // piece) * _SUM.itemsize:
            raise self._wrong(f"is of a file of {size} bytes, not of one of {num_bytes}")
        self._piece, self._shift = piece, piece.bit_length() - 1
        self._sums: list[int] = np.frombuffer(sums, _SUM).tolist()
        # For each piece 1 if it was not compared yet. One more entry serves reads of 0 bytes at the
        # end of the file.
        self._unread = bytearray(b"\1" * len(self._sums) + b"\0")

    def _wrong(self, problem: str) -> DataError:
        return DataError(
            f"'{self.path}' {problem}: copy it together with '{self.token_file}', tokenize "
            "the data again, or remove it if that file was not written by `llmq tokenize`"
        )

    @classmethod
    def of(cls, token_file: Path) -> Checksums | None:
        """Checksums of a token file, shared by all readers of the file; None without a `.sums`
        file. DataError for a `.sums` file that cannot be read."""
        path = checksums_path(token_file)
        try:
            own, other = os.stat(path), os.stat(token_file)
        except FileNotFoundError:
            return None
        except OSError as error:  # such as a link to itself
            raise DataError(f"cannot read '{path}': {error.strerror}") from error
        stamps = (own.st_mtime_ns, other.st_mtime_ns, own.st_ino, other.st_ino)
        return _checksums(path.absolute(), token_file.absolute(), other.st_size, stamps)

    def verify(self, descriptor: int, start: int, stop: int) -> None:
        """Compare the pieces of bytes [start, stop) that were not compared yet. descriptor: file
        descriptor of the open token file. DataError for a damaged piece."""
        unread, shift = self._unread, self._shift
        first, last = start >> shift, (stop - 1) >> shift
        # Training reads many short rows, for most of which this test is the only work.
        if unread[first] or unread[last] or last - first > 1:
            while (first := unread.find(1, first, last + 1)) >= 0:
                self._compare(descriptor, first)

    def _compare(self, descriptor: int, index: int) -> None:
        begin = index * self._piece
        size = min(self._piece, self.num_bytes - begin)
        # Allocating a buffer for each piece would cost a system call each time.
        if len(getattr(_of_thread, "buffer", b"")) < size:
            _of_thread.buffer = memoryview(bytearray(self._piece))
        data = _of_thread.buffer[:size]
        got = os.preadv(descriptor, (data,), begin)
        if got != size or sum_of(data) != self._sums[index]:
            raise DataError(
                f"'{self.token_file}' is damaged: bytes {begin} to {begin + self._piece} are not "
                f"those that '{self.path}' was written for: copy both again, tokenize the data "
                "again, or remove the latter if another program has written the former"
            )
        self._unread[index] = 0

    @property
    def has_documents(self) -> bool:
        """True if there was a `.docs` file when the `.sums` file was written."""
        return self._docs_bytes >= 0

    def verify_documents(self, data: bytes, path: Path) -> None:
        """Compare the checksum of `data`, the content of the `.docs` file. path: the `.docs` file,
        for messages. DataError for another content."""
        if (len(data), sum_of(data)) != (self._docs_bytes, self._docs):
            raise DataError(
                f"'{path}' is not the one that '{self.path.name}' was written for: it is damaged, "
                "or of another token file; copy them together, or tokenize the data again"
            )


def find_token_files(pattern: str | Path) -> list[Path]:
    """Token files that a glob pattern names, without the files beside token files; for a folder of
    `llmq tokenize` the files of the training part."""
    paths = expand_pattern(pattern)
    if len(paths) == 1 and paths[0].is_dir():
        paths = sorted(paths[0].glob("train*.bin"))
    return [
        path
        for path in paths
        if path.suffix not in (SUFFIX, DOCUMENTS_SUFFIX, ARRAY_SUFFIX) and not path.is_dir()
    ]


@functools.cache
def _checksums(path: Path, token_file: Path, num_bytes: int, stamps: tuple[int, ...]) -> Checksums:
    """Checksums of a token file, cached. stamps: numbers that differ if a file was replaced, for
    the cache's key."""
    return Checksums(path, token_file, num_bytes)
