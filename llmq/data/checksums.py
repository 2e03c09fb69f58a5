"""The `.sums` file beside a token file: checksums of its pieces, and of its `.docs` file.

    offset 0     8 bytes  b"BIN.SUM\\n"
           8     int32    version, 1
          12     int32    bytes of a piece, PIECE_BYTES; the last one may have fewer
          16     int64    bytes of the token file
          24     int64    bytes of its `.docs` file, -1 without one
          32     uint32   CRC-32 of the `.docs` file
          36     uint32   CRC-32 of all that is here from offset 44 on
          40     uint32   CRC-32 of the 40 bytes before
          44     n uint32 CRC-32 of each piece of the token file

Everything is little-endian. A piece is small, because rows are read in a shuffled order and the
first one that reads of a piece has to read all of it.
"""

from __future__ import annotations

import functools
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llmq.base.errors import DataError
from llmq.base.files import check_readable, disk_errors, replacing
from llmq.data.document_file import documents_path

MAGIC = b"BIN.SUM\n"
VERSION = 1
SUFFIX = ".sums"
PIECE_BYTES = 1 << 16

_FIELDS = struct.Struct("<8s2i2q2I")  # and the checksum of these
_HEADER_BYTES = _FIELDS.size + 4
_SUM = np.dtype("<u4")


def checksums_path(token_file: Path) -> Path:
    """Of the `.sums` file of a token file: X.sums for X.bin."""
    return token_file.with_name(token_file.name.removesuffix(".bin") + SUFFIX)


def write_checksums(token_file: Path) -> None:
    """Write the `.sums` file of a token file and its `.docs` file. Raises LlmqError."""
    with disk_errors(checksums_path(token_file)):
        with open(token_file, "rb", buffering=0) as file:
            pieces = iter(functools.partial(file.read, PIECE_BYTES), b"")
            sums = np.array([zlib.crc32(piece) for piece in pieces], _SUM).tobytes()
            num_bytes = os.fstat(file.fileno()).st_size
        documents, docs_bytes = documents_path(token_file), -1
        docs = b""
        if documents.exists():
            docs = documents.read_bytes()
            docs_bytes = len(docs)
    counts = (PIECE_BYTES, num_bytes, docs_bytes)
    head = _FIELDS.pack(MAGIC, VERSION, *counts, zlib.crc32(docs), zlib.crc32(sums))
    with replacing(checksums_path(token_file)) as file:
        file.write(head + struct.pack("<I", zlib.crc32(head)) + sums)


class Checksums:
    """What a `.sums` file says, and which pieces were found to agree with it.

    Threads may share one: at worst two of them compare the same piece.
    """

    def __init__(self, path: Path, token_file: Path, num_bytes: int) -> None:
        """num_bytes: of the token file. DataError if it is damaged, or of one of another size."""
        self.path, self.token_file, self.num_bytes = path, token_file, num_bytes
        try:
            check_readable(path)
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}") from error
        head, sums = data[: _FIELDS.size], data[_HEADER_BYTES:]
        if not data.startswith(MAGIC) or len(data) < _HEADER_BYTES:
            raise self._wrong("is no file of checksums")
        (own,) = struct.unpack_from("<I", data, _FIELDS.size)
        _, version, piece, size, self._docs_bytes, self._docs, of_sums = _FIELDS.unpack(head)
        if zlib.crc32(head) != own or zlib.crc32(sums) != of_sums:
            raise self._wrong("is damaged")
        if version != VERSION or piece <= 0:
            raise self._wrong(f"has version {version}, only {VERSION} can be read")
        if size != num_bytes or len(sums) != -(-size // piece) * _SUM.itemsize:
            raise self._wrong(f"is of a file of {size} bytes, not of one of {num_bytes}")
        self._piece, self._sums = piece, np.frombuffer(sums, _SUM).tolist()
        self._unread = bytearray(b"\1" * len(self._sums))  # 1: not compared yet

    def _wrong(self, problem: str) -> DataError:
        return DataError(
            f"'{self.path}' {problem}: copy it together with '{self.token_file}', or remove it if "
            "that file was not written by `llmq tokenize`"
        )

    @classmethod
    def of(cls, token_file: Path) -> Checksums | None:
        """Of a token file; None if there are none. One for all who read the same file.

        DataError if there are some that cannot be read.
        """
        path = checksums_path(token_file)
        try:
            own, other = os.stat(path), os.stat(token_file)
        except FileNotFoundError:
            return None
        except OSError as error:  # such as a link to itself
            raise DataError(f"cannot read '{path}': {error.strerror}") from error
        stamps = (own.st_mtime_ns, other.st_mtime_ns, own.st_ino, other.st_ino)
        return _checksums(path.absolute(), token_file.absolute(), other.st_size, stamps)

    def verify(self, file: BinaryIO, start: int, stop: int) -> None:
        """Compare the pieces of bytes [start, stop) that were not read yet.

        file: the token file, unbuffered; its place is lost. DataError names what is damaged.
        """
        first, last = start // self._piece, -(-stop // self._piece)
        while (first := self._unread.find(1, first, last)) >= 0:
            self._compare(file, first)

    def _compare(self, file: BinaryIO, index: int) -> None:
        begin = index * self._piece
        file.seek(begin)
        data = file.read(min(self._piece, self.num_bytes - begin))
        if zlib.crc32(data) != self._sums[index]:
            raise DataError(
                f"'{self.token_file}' is damaged: bytes {begin} to {begin + self._piece} are not "
                f"those that '{self.path}' was written for: copy both again, tokenize the data "
                "again, or remove the latter if another program has written the former"
            )
        self._unread[index] = 0

    @property
    def has_documents(self) -> bool:
        """Whether there was a `.docs` file when these were written."""
        return self._docs_bytes >= 0

    def verify_documents(self, data: bytes, path: Path) -> None:
        """Compare the content of the `.docs` file. DataError."""
        if (len(data), zlib.crc32(data)) != (self._docs_bytes, self._docs):
            raise DataError(
                f"'{path}' is not the one that '{self.path.name}' was written for: it is damaged, "
                "or of another token file; copy them together, or tokenize the data again"
            )


@functools.cache
def _checksums(path: Path, token_file: Path, num_bytes: int, stamps: tuple[int, ...]) -> Checksums:
    """stamps: by which files that were replaced meanwhile are known."""
    return Checksums(path, token_file, num_bytes)
