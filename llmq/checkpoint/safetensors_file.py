"""The safetensors format: read files piece by piece, and write them as a stream.

    offset 0      uint64   n, length of the header
           8      JSON     {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__"}
       8 + n      bytes    the tensors, without gaps; the offsets count from here

The `safetensors` library checks the headers of files that other programs wrote (`open_foreign`).
Tensors are read and written here, because the library, in its release 0.8 with NumPy,

- maps the file: a disk that fails, or a file that becomes shorter, ends the process with SIGBUS;
- reads no FP8, E8M0 or FP4, and gives no bytes of element types that NumPy lacks;
- writes a file only from tensors that are all in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from llmq.base.dtypes import DTYPES, DType
from llmq.base.errors import LlmqError
from llmq.base.files import open_file, read_errors
from llmq.ref.common import row_blocks

NUMPY_DTYPES = {d.label: d.numpy for d in DTYPES.values()} | {"F16": np.dtype(np.float16)}
"""The NumPy type of each readable element type, by the element type's name in the header."""

HEADER_ALIGN = 64  # bytes: aligns tensors of a mapped file for vector loads
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
READ_BYTES = 1 << 30  # one read call transfers less than 2 GiB
PIECE = 1 << 20  # elements per read: few enough for the processor's cache
BYTES = 1 << 24  # bytes per read of a tensor that is copied unchanged


class StoredTensor(NamedTuple):
    """One entry of the header. offset: position of the tensor's first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open safetensors file. Threads may share the file.

    tensors: StoredTensor by name. metadata: the header's `__metadata__`, a text for each key.
    """

    def __init__(self, path: Path) -> None:
        """Read the header of a file whose checksum agrees; use `open_foreign` for other files.
        LlmqError if the file cannot be read, has a damaged header, or has another length than the
        header says."""
        self.path = path
        with read_errors(path, LlmqError):
            self._file = open_file(path)
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        num_bytes = os.fstat(self._file.fileno()).st_size
        if num_bytes < 8:
            raise LlmqError(f"'{self.path}' is no safetensors file: it has only {num_bytes} bytes")
        length = int(self._read_bytes(0, 8).view("<u8")[0])
        if length > MAX_HEADER_BYTES:
            raise self.damaged(f"its header would have {length} bytes")
        if 8 + length > num_bytes:
            raise self._truncated(num_bytes, 8 + length)
        try:
            header = json.loads(self._read_bytes(8, length).tobytes())
            self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
            self.tensors = {
                name: _stored_tensor(entry, 8 + length) for name, entry in header.items()
            }
            end = max((x.offset + x.nbytes for x in self.tensors.values()), default=8 + length)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self.damaged(f"its header is damaged ({error})") from error
        if end > num_bytes:
            raise self._truncated(num_bytes, end)
        if end < num_bytes:  # if bytes were inserted, all tensors are shifted
            raise self.damaged(f"it has {num_bytes} bytes, but its header says {end}")

    def damaged(self, reason: str) -> LlmqError:
        return LlmqError(f"'{self.path}' is no valid safetensors file: {reason}; copy it again")

    def _truncated(self, num_bytes: int, expected: int) -> LlmqError:
        return LlmqError(
            f"'{self.path}' is truncated: {num_bytes} bytes, but its header says {expected}; "
            "copy it again"
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return elements [start, stop) of a tensor, in one dimension and in the stored dtype.
        LlmqError for an unknown dtype, or if the file cannot be read."""
        tensor = self.tensors[name]
        dtype = NUMPY_DTYPES.get(tensor.dtype)
        if dtype is None:
            raise LlmqError(f"'{self.path}': {name} has the unknown element type {tensor.dtype!r}")
        stop = prod(tensor.shape) if stop is None else stop
        offset = tensor.offset + start * dtype.itemsize
        return self._read_bytes(offset, (stop - start) * dtype.itemsize).view(dtype)

    def _read_bytes(self, offset: int, count: int) -> np.ndarray:
        out = np.empty(count, np.uint8)
        done = 0
        while done < count:
            chunk = memoryview(out[done : done + READ_BYTES])
            with read_errors(self.path, LlmqError):
                got = os.preadv(self._file.fileno(), [chunk], offset + done)
            if not got:
                raise LlmqError(f"'{self.path}' became shorter while it was read; copy it again")
            done += got
        return out

    def byte_pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield the bytes of a tensor of any dtype, as uint8, up to 16 MiB at a time. LlmqError if
        the file cannot be read."""
        stored = self.tensors[name]
        for start in range(0, stored.nbytes, BYTES):
            yield self._read_bytes(stored.offset + start, min(BYTES, stored.nbytes - start))

    def close(self) -> None:
        self._file.close()


def open_foreign(path: Path) -> SafetensorsFile:
    """Open a file of another program. LlmqError as in SafetensorsFile, and if the library refuses
    the header: gaps, or dtypes and shapes that do not agree with offsets."""
    file = SafetensorsFile(path)  # checks the length, so that mapping raises no SIGBUS
    try:
        with read_errors(path, LlmqError), safe_open(path, framework="numpy"):
            return file
    except SafetensorError as error:
        file.close()
        reason = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        raise file.damaged(f"its header is damaged ({reason})") from error


class FileTensor:
    """A tensor of an open file. path: the file's path. name, dtype, shape: values in the header."""

    def __init__(self, file: SafetensorsFile, name: str):
        stored = file.tensors[name]
        self.path, self.name, self.dtype, self.shape = file.path, name, stored.dtype, stored.shape
        self.nbytes, self._file = stored.nbytes, file

    def flat(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return elements [start, stop), in one dimension and in the stored dtype. LlmqError if the
        file has become shorter."""
        return self._file.read(self.name, start, stop)

    def byte_pieces(self) -> Iterator[np.ndarray]:
        """Return an iterator over all bytes, as uint8, up to 16 MiB at a time."""
        return self._file.byte_pieces(self.name)

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield all rows, a few at a time: the slice of rows, and the rows' values in the stored
        dtype."""
        size = prod(self.shape[1:])
        for rows in row_blocks(self.shape[0], size, PIECE):
            values = self.flat(rows.start * size, rows.stop * size)
            yield rows, values.reshape(-1, *self.shape[1:])

    def rows(self, start: int, stop: int, *, transposed: bool = False) -> np.ndarray:
        """Return rows [start, stop). transposed: True to return columns [start, stop) as rows. In a
        tensor with three axes, rows (or columns) count through all experts."""
        inner, height = self.shape[-2:]
        if not transposed:
            return self.flat(start * height, stop * height).reshape(-1, height)
        size, blocks = inner * height, []
        for first in range(start - start % height, stop, height):
            own = slice(max(start - first, 0), min(stop - first, height))
            expert = self.flat(first * inner, first * inner + size).reshape(inner, height)
            blocks.append(expert[:, own].T)
        return np.concatenate(blocks)


def _stored_tensor(entry: dict[str, Any], data_start: int) -> StoredTensor:
    """Return an entry of the header, parsed. KeyError, TypeError or ValueError if the entry is
    malformed."""
    begin, end = entry["data_offsets"]
    return StoredTensor(entry["dtype"], tuple(entry["shape"]), data_start + begin, end - begin)


class TensorSpec(NamedTuple):
    """A tensor to write: name, dtype and shape."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        return self.dtype.label

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def pieces(self, array: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of an array, as uint8; ValueError unless the array has the spec's dtype
        and shape."""
        if array.dtype != self.dtype.numpy or array.shape != self.shape:
            raise ValueError(
                f"write_safetensors: {self.name} must be {self.dtype} {list(self.shape)}, "
                f"got {array.dtype} {list(array.shape)}"
            )
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class CopiedSpec(NamedTuple):
    """A tensor to copy byte by byte, of any dtype. label: the dtype in the header."""

    name: str
    label: str
    shape: tuple[int, ...]
    nbytes: int

    def pieces(self, tensor: FileTensor) -> Iterator[np.ndarray]:
        return tensor.byte_pieces()


def write_safetensors(
    file: BinaryIO,
    specs: Sequence[TensorSpec | CopiedSpec],
    arrays: Iterable[np.ndarray | FileTensor],
    metadata: dict[str, str],
) -> tuple[int, str]:
    """Write a whole file; return its size in bytes and its SHA-256 in hex.

    arrays: the tensors in the order of specs, read one at a time; a FileTensor for each CopiedSpec,
    else an array. ValueError if an array has another dtype or shape than its spec.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.label,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(8 + len(text)) // HEADER_ALIGN) * HEADER_ALIGN - 8)
    digest = hashlib.sha256(len(text).to_bytes(8, "little") + text)
    file.write(len(text).to_bytes(8, "little") + text)
    with ThreadPoolExecutor(1) as beside:  # hashes beside this thread's writes
        for spec, array in zip(specs, arrays, strict=True):
            for piece in spec.pieces(array):
                hashed = beside.submit(digest.update, piece.data)
                file.write(piece.data)
                hashed.result()
    return 8 + len(text) + offset, digest.hexdigest()
