"""Files that are packed with gzip or Zstandard, read as if they were not."""

import gzip
import io
from typing import Any, BinaryIO

from llmq.base.errors import DataError

_MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}  # RFC 1952, RFC 8878
PACKED = tuple(_MAGIC)
READ_BYTES = 1 << 18  # of a file at once
_PACKED_BYTES = 1 << 12  # of Zstandard at once, whose content may be thousands of times as long
MOST_RATIO = 500  # bytes of content for each that is packed; text has 2 to 20
_FREE_BYTES = 64 << 20  # of content, which may have any ratio


def is_packed(path: str) -> bool:
    """Whether `unpack` does anything, by the name."""
    return path.lower().endswith(PACKED)


def packing_of(begin: bytes) -> str:
    """The ending of a file's name that goes with how its content begins; "" if it is not packed."""
    return next((ending for ending, magic in _MAGIC.items() if begin.startswith(magic)), "")


def unpack(path: str, raw: io.BufferedReader) -> io.BufferedReader:
    """The content of an open file, whose path says how it is packed; `raw` itself if it is not.

    Reading raises OSError, EOFError or zlib.error where it is damaged or ends too early. DataError
    where the library for it is missing, and for what is no text but a bomb: MOST_RATIO.
    """
    if path.lower().endswith(".gz"):
        content = gzip.GzipFile(fileobj=raw)
    elif path.lower().endswith(".zst"):
        content = _Zstd(path, raw)
    else:
        return raw
    return io.BufferedReader(_Measured(path, raw, content), READ_BYTES)


def skip(file: BinaryIO, count: int) -> None:
    """Go on `count` bytes behind the start of what was just opened, by reading if it must be."""
    if file.seekable():
        file.seek(count)
        return
    for skipped in range(0, count, READ_BYTES):
        file.read(min(READ_BYTES, count - skipped))


def unpacked_size(path: str) -> int:
    """Bytes of the content, which takes reading all of it."""
    size = 0
    with open(path, "rb") as raw, unpack(path, raw) as file:
        while block := file.read(READ_BYTES):
            size += len(block)
    return size


class _Measured(io.RawIOBase):
    """The content of a packed file, as long as it is not too long for what it is packed in."""

    def __init__(self, path: str, raw: BinaryIO, content: Any) -> None:
        self._path, self._raw, self._content, self._bytes = path, raw, content, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        count = self._content.readinto(target)
        self._bytes += count
        if self._bytes > max(_FREE_BYTES, MOST_RATIO * self._raw.tell()):
            raise DataError(
                f"'{self._path}' holds more than {MOST_RATIO} times its own size, as no text does: "
                "leave it out, or unpack it"
            )
        return count


class _Zstd(io.RawIOBase):
    """The content of Zstandard frames. The library's own reader is silent about a file that ends in
    the middle of one."""

    def __init__(self, path: str, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"reading '{path}' needs zstandard: pip install zstandard") from error
        self._library, self._raw = zstandard, raw
        self._frame: Any = None  # the one that is being read
        self._packed, self._content = b"", memoryview(b"")  # what was read and not used

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._content:
            self._packed = self._packed or self._raw.read(_PACKED_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a Zstandard frame")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._content = memoryview(self._frame.decompress(self._packed))
            except self._library.ZstdError as error:
                raise OSError(str(error)) from error
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(target), len(self._content))
        target[:count], self._content = self._content[:count], self._content[count:]
        return count
