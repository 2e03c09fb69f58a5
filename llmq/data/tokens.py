"""Token files (`.bin`): check, read and write.

    offset 0     8 bytes  b"BIN.TOK\n"
           8     int32    version, 1 or 2 (written: 2; version 1 carries no vocabulary size)
          12     int32    bytes per token, 4
          16     int32    number of tokens n
          20     int32    vocabulary size
          24     int32    1 = loss masks follow the tokens, 2 = weights do
          28     filler   up to 1024 bytes: "*", then a newline
        1024     n int32  token ids; documents follow one another
    1024 + 4n    bits     only with masks: one bit per token, least significant first, 1 = train
    1024 + 4n    n bytes  only with weights: weight of each token in 200ths, 0 = do not train

All numbers are little-endian. The mask bit of a token is 1 if the token is trained as a target.
While a file is written, weights are in a file of their own, `X.mask.partial` beside
`X.bin.partial`, because weights and mask bits are stored behind all tokens.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llmq.base.errors import DataError
from llmq.base.files import disk_errors, open_file, read_errors, sync_directory
from llmq.data.checksums import Checksums, checksums_path, find_token_files, write_checksums
from llmq.data.document_file import DocumentWriter, PartialFile, documents_path, partial_path
from llmq.data.public_sets import maker


def mask_path(token_file: Path) -> Path:
    """Path of a token file's masks; only its `partial_path` ever exists, while the token file is
    written."""
    return token_file.with_name(token_file.name.removesuffix(".bin") + ".mask")


class MaskWriter(PartialFile):
    """Writer of tokens' weights or mask bits: one byte for each token, its weight in 200ths."""

    def __init__(self, path: Path, keep: np.ndarray | int = 0) -> None:
        """keep: number of weights of the partial file to keep, or the weights (n,) to keep."""
        self.path = path
        self._begin(keep if isinstance(keep, int) else 0)
        if not isinstance(keep, int):
            self.write(keep)

    def write(self, mask: np.ndarray) -> None:
        """Append weights (n,) from 0 to 1, or mask bits (n,)."""
        with disk_errors(self.path):
            self._file.write(np.rint(mask * np.float64(WEIGHT_PARTS)).astype(np.uint8).tobytes())

    def copy_to(self, file: BinaryIO, *, as_bits: bool) -> None:
        """Append all weights to another file: one byte each, or with as_bits one bit each, 1 for a
        weight above 0."""
        self.sync()
        with disk_errors(self.path), open(self._file.name, "rb") as weights:
            while piece := weights.read(_COPY_BYTES):
                bits = np.frombuffer(piece, np.uint8) > 0
                file.write(np.packbits(bits, bitorder="little").tobytes() if as_bits else piece)


MAGIC = b"BIN.TOK\n"
VERSION = 2
HEADER_BYTES = 1024
TOKEN_BYTES = 4
MAX_TOKENS = 2**31 - 1  # the header counts tokens in an int32
MASKED_TARGET = -100  # the target id that the loss ignores
WEIGHT_PARTS = 200  # weights are multiples of 1 / WEIGHT_PARTS

_SAMPLES, _SAMPLE_BYTES = 8, 4096
_COPY_BYTES = 1 << 20
_FIELDS = struct.Struct("<8s5i")
_TOKEN = np.dtype("<i4")


def open_token_files(
    patterns: str | Path | Sequence[str | Path], vocab_size: int | None = None
) -> list[TokenFile]:
    """Checked token files that glob patterns name, in sorted order. vocab_size: size of the model's
    vocabulary; no file may have a larger one. DataError for the first file that is missing or
    damaged, or has a larger vocabulary or another one than the first file."""
    if isinstance(patterns, str | Path):
        patterns = [patterns]
    paths: set[Path] = set()
    for pattern in patterns:
        matches = find_token_files(pattern)
        if not matches:
            command = maker(str(pattern))
            way = f"`{command}` makes this" if command else "`llmq tokenize` writes such files"
            raise DataError(
                f"no token file matches '{pattern}': give a .bin file or a quoted pattern such as "
                f"'data/train*.bin'; {way}"
            )
        paths.update(matches)
    files = [TokenFile(path) for path in sorted(paths, key=os.fsencode)]
    known = [file for file in files if file.vocab_size]
    for file in known:
        if file.vocab_size != known[0].vocab_size:
            raise DataError(
                f"'{file.path}' has a vocabulary of {file.vocab_size} tokens but "
                f"'{known[0].path}' has {known[0].vocab_size}: use one tokenizer for all files"
            )
        if vocab_size is not None and file.vocab_size > vocab_size:
            raise DataError(
                f"'{file.path}' has a vocabulary of {file.vocab_size} tokens but the model has "
                f"only {vocab_size}: tokenize the data with this model's tokenizer"
            )
    return files


# ------------------------------------------------------------------------------------------------
# Reading


class TokenFile:
    """Checked token file, for one thread. vocab_size: size of the vocabulary; 0 if unknown.
    has_weights: True if the file has weights, which serve as masks too. num_bytes: size of the
    file. checksums: checksums of the file's pieces, compared at the first read of a piece; None
    without a `.sums` file."""

    __slots__ = (
        "_file",
        "checksums",
        "has_masks",
        "has_weights",
        "num_bytes",
        "num_tokens",
        "path",
        "version",
        "vocab_size",
    )

    def __init__(self, path: str | Path) -> None:
        """Check the header against the format and the size. DataError for a wrong header."""
        self.path = Path(path)
        self._file: BinaryIO | None = None
        with read_errors(f"token file '{path}'"), open_file(self.path) as file:
            header = file.read(HEADER_BYTES)
            self.num_bytes = os.fstat(file.fileno()).st_size
        if not header.startswith(MAGIC):
            raise DataError(
                f"'{path}' is not a token file: it starts with {header[:8]!r} instead of "
                f"{MAGIC!r}; make one with `llmq tokenize`"
            )
        if len(header) < HEADER_BYTES:
            raise DataError(
                f"'{path}' is truncated: {len(header)} bytes, less than its header of "
                f"{HEADER_BYTES}; write it again"
            )
        _, self.version, width, self.num_tokens, vocab_size, masks = _FIELDS.unpack_from(header)
        self.vocab_size = vocab_size if self.version == VERSION else 0
        self.has_masks, self.has_weights = masks in (1, 2), masks == 2
        self._check(width)
        self.checksums = Checksums.of(self.path)

    def _check(self, width: int) -> None:
        again, problem = "tokenize the data again with this program", ""
        expected = HEADER_BYTES + TOKEN_BYTES * self.num_tokens
        if self.has_masks:
            expected += self.num_tokens if self.has_weights else (self.num_tokens + 7) // 8
        if self.version not in (1, VERSION):
            problem = f"has version {self.version}; versions 1 and {VERSION} can be read: {again}"
        elif width != TOKEN_BYTES:
            problem = f"stores {width} bytes per token; only {TOKEN_BYTES} can be read: {again}"
        elif self.num_tokens < 0 or self.vocab_size < 0:
            problem = f"has a damaged header: {self.num_tokens} tokens, vocabulary of "
            problem += f"{self.vocab_size}; write the file again"
        elif self.num_bytes != expected:
            state = "is truncated" if self.num_bytes < expected else "is too long"
            problem = f"{state}: {self.num_bytes} bytes, but its header says {self.num_tokens} "
            problem += f"tokens{' with masks' * self.has_masks} = {expected} bytes; copy or write "
            problem += "the file again"
        if problem:
            raise DataError(f"'{self.path}' {problem}")

    def read_tokens(self, start: int, count: int) -> np.ndarray:
        """Token ids [start, start + count), int32 (count,); start + count <= num_tokens."""
        out = np.empty(count, _TOKEN)
        self._read_into(HEADER_BYTES + TOKEN_BYTES * start, out)
        return out.astype(np.int32, copy=False)

    def read_tokens_into(self, start: int, out: np.ndarray) -> None:
        """Read ids from `start` on into all of `out`, contiguous, of dtype "<i4"."""
        self._read_into(HEADER_BYTES + TOKEN_BYTES * start, out)

    def read_mask(self, start: int, count: int) -> np.ndarray:
        """Mask bits [start, start + count), bool (count,): True for a token that is trained as a
        target."""
        if not self.has_masks:
            return np.ones(count, bool)
        if self.has_weights:
            return self.read_weights(start, count) > 0
        first = start // 8
        packed = np.empty((start + count + 7) // 8 - first, np.uint8)
        self._read_into(HEADER_BYTES + TOKEN_BYTES * self.num_tokens + first, packed)
        bits = np.unpackbits(packed, bitorder="little")
        return bits[start - 8 * first :][:count].astype(bool)

    def read_weights(self, start: int, count: int) -> np.ndarray:
        """Weights [start, start + count), float32 (count,); mask bits of a file without weights."""
        if not self.has_weights:
            return self.read_mask(start, count).astype(np.float32)
        codes = np.empty(count, np.uint8)
        self._read_into(HEADER_BYTES + TOKEN_BYTES * self.num_tokens + start, codes)
        return codes / np.float32(WEIGHT_PARTS)

    def sample(self) -> int:
        """CRC-32 of a few pieces at equal distances, which recognizes another content."""
        size = min(_SAMPLE_BYTES, self.num_bytes)
        piece, checksum = np.empty(size, np.uint8), 0
        for number in range(_SAMPLES):
            self._read_into((self.num_bytes - size) * number // (_SAMPLES - 1), piece)
            checksum = zlib.crc32(piece, checksum)
        self.close()
        return checksum

    def _read_into(self, offset: int, out: np.ndarray) -> None:
        # Reads instead of a memory map: if a file shrinks or a network disk fails, a read raises
        # an error, but a map would kill the process with SIGBUS.
        try:
            if self._file is None:
                self._file = open_file(self.path)
            descriptor, size = self._file.fileno(), out.nbytes
            if self.checksums is not None:
                self.checksums.verify(descriptor, offset, offset + size)
            got = os.preadv(descriptor, (out,), offset)
        except OSError as error:
            raise DataError(f"cannot read '{self.path}': {error.strerror}") from error
        if got != size:
            raise DataError(
                f"'{self.path}' became shorter while it was used: {got} of {size} bytes at "
                f"offset {offset}; restore the file and continue from the last checkpoint"
            )

    def close(self) -> None:
        """Close the file descriptor; the next read opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None


# ------------------------------------------------------------------------------------------------
# Writing


class TokenWriter(PartialFile):
    """Writer of a token file, piece by piece; only a complete file has the file's name. A `with`
    block closes the writer at the end, or discards the partial file if the block raises."""

    def __init__(
        self,
        path: str | Path,
        vocab_size: int,
        *,
        with_masks: bool = False,
        with_weights: bool = False,
        with_documents: bool = False,
        in_pairs: bool = False,
        with_checksums: bool = False,
        keep_tokens: int = 0,
    ) -> None:
        """keep_tokens: number of tokens to keep of a partial file. with_weights: True for weights
        as masks. in_pairs: True if every two documents are a pair. with_documents, with_checksums:
        True to write the `.docs` file or the `.sums` file, False to remove this file of an earlier
        token file."""
        self.path = Path(path)
        self._documents: DocumentWriter | None = None
        self._masks: MaskWriter | None = None
        self.vocab_size = vocab_size
        self.with_masks, self.with_checksums = with_masks or with_weights, with_checksums
        self.with_weights = with_weights
        self.num_tokens = keep_tokens
        if self.with_masks:
            self._masks = self._open_masks(keep_tokens)
        self._begin(HEADER_BYTES + TOKEN_BYTES * keep_tokens if keep_tokens else 0)
        if not keep_tokens:
            with disk_errors(self.path):
                self._file.write(self._header())
        if with_documents:
            self._documents = DocumentWriter(documents_path(self.path), keep_tokens, in_pairs)
        self.beside = [file for file in (self._documents, self._masks) if file is not None]

    def _open_masks(self, keep_tokens: int) -> MaskWriter:
        path, kept = mask_path(self.path), keep_tokens
        if keep_tokens and not partial_path(path).exists():  # the token file was complete already
            complete = TokenFile(partial_path(self.path))
            kept = complete.read_weights(0, keep_tokens)
            complete.close()
        return MaskWriter(path, kept)

    def _header(self) -> bytes:
        fields = _FIELDS.pack(
            *(MAGIC, VERSION, TOKEN_BYTES, self.num_tokens, self.vocab_size),
            self.with_masks + self.with_weights,
        )
        return fields.ljust(HEADER_BYTES - 1, b"*") + b"\n"

    def write(
        self,
        tokens: np.ndarray | Iterable[int],
        mask: np.ndarray | None = None,
        ends: np.ndarray | Sequence[int] = (),
    ) -> None:
        """Append token ids (n,). mask: bool (n,), True for a token that is trained as a target, or
        weights (n,) from 0 to 1.

        ends: (k,) rising from 0 to n: number of this call's tokens in front of each end of a
        document; the last document may continue in the next call. ValueError for ids outside the
        vocabulary;
        LlmqError for a full disk, or a file of more than 2^31 - 1 tokens.
        """
        tokens = np.asarray(tokens)
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            raise ValueError(
                f"TokenWriter.write: ids must be in 0..{self.vocab_size - 1}, "
                f"got {tokens.min()}..{tokens.max()}"
            )
        if (mask is not None) != self.with_masks or (mask is not None and len(mask) != len(tokens)):
            raise ValueError("TokenWriter.write: give one mask bit per token iff with_masks is set")
        ends = np.asarray(ends, np.int64)
        steps = np.diff(ends, prepend=0, append=len(tokens))
        if (steps < 0).any() or (len(ends) and self._documents is None):
            raise ValueError(
                "TokenWriter.write: ends must rise within the tokens, and need with_documents"
            )
        if self.num_tokens + len(tokens) > MAX_TOKENS:
            raise DataError(f"'{self.path}' would exceed {MAX_TOKENS} tokens: write several files")
        with disk_errors(self.path):
            self._file.write(tokens.astype(_TOKEN, copy=False).tobytes())
        if self._documents is not None:
            self._documents.add(ends + self.num_tokens)
        self.num_tokens += len(tokens)
        if self._masks is not None:
            self._masks.write(mask)

    def close(self) -> None:
        """Write masks and header, force the file to the disk, and rename the file. The `.docs` file
        is renamed first, so that no complete token file lacks its `.docs` file."""
        with disk_errors(self.path), self._file:
            if self._masks is not None:
                self._masks.copy_to(self._file, as_bits=not self.with_weights)
            self._file.seek(0)
            self._file.write(self._header())
            self.sync()
        if self._documents is not None:
            complete = TokenFile(partial_path(self.path))
            self._documents.close(self.num_tokens, complete.read_tokens)
            complete.close()
        else:
            documents_path(self.path).unlink(missing_ok=True)
        checksums_path(self.path).unlink(missing_ok=True)  # checksums of an earlier token file
        os.replace(partial_path(self.path), self.path)
        sync_directory(self.path.parent)
        if self.with_checksums:
            write_checksums(self.path)
        if self._masks is not None:
            self._masks.discard()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
