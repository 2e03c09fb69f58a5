"""The documents of inputs, as a stream that can be resumed anywhere.

A text file is one document; each record of JSON, each row of a table and each record of a data set
is one (`base/records.py`, `inputs.py`). Memory is constant: a long text comes in pieces of up to
256 KiB, each cut where that does not change the tokens; Parquet is read one row group at a time.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import BinaryIO, NamedTuple

from llmq.base.errors import DataError
from llmq.base.records import (
    MAX_RECORD,
    TABLES,
    Item,
    Wanted,
    read_csv,
    read_json,
    read_parquet,
    too_long,
)
from llmq.base.unpack import is_packed, skip, unpack, unpacked_size
from llmq.data.inputs import InputSource, is_html

BLOCK_PIECES = 1024  # small documents that travel together
PIECE_BYTES = 1 << 18  # read of a long text at once; small, so that Ctrl-C is prompt


@dataclass(frozen=True, slots=True)
class Position:
    """The place where reading goes on. offset: bytes of the unpacked file, rows of a table."""

    source: int = 0
    offset: int = 0
    line: int = 0  # lines of JSONL before it, or elements of an array
    document: int = 0  # documents before it, over all sources
    skipped: int = 0  # files that were not text
    bytes_read: int = 0  # over all sources, as they lie on the disk; for the progress bar


class DocumentPart(NamedTuple):
    """A document or a part of one. text: str, or bytes that hold a JSON record."""

    text: str | bytes
    is_eval: bool
    is_end: bool  # the document ends here
    where: str  # for messages
    is_start: bool = True  # the document begins here


class Block(NamedTuple):
    """Parts of documents to be encoded together, and where reading goes on after them."""

    pieces: list[DocumentPart]
    end: Position


# ------------------------------------------------------------------------------------------------
# Documents for evaluation


class EvalSplit:
    """Sends a fraction of the documents to evaluation, or the last part of a single text.

    One of every 1/fraction documents is taken, at a place that depends on the seed; of the first
    1/fraction the second one, so that two documents are enough for both parts.
    """

    def __init__(self, fraction: float, seed: int, sources: Sequence[InputSource]) -> None:
        """fraction: 0 <= fraction < 1. A single text is read a little, to cut it at a line."""
        self._fraction = Fraction(fraction).limit_denominator(1_000_000)
        self._seed = seed
        self._chosen = (-1, -1)  # number and chosen document of the stratum that was used last
        self.offset: int | None = None  # the start of a single text's evaluation part
        if self._fraction and len(sources) == 1 and sources[0].kind == "text":
            self.offset = self._cut(sources[0])

    def _cut(self, source: InputSource) -> int:
        size = unpacked_size(source.path) if is_packed(source.path) else source.size
        offset = int(size * (1 - self._fraction))
        start = max(0, offset - PIECE_BYTES)
        with open(source.path, "rb") as raw, unpack(source.path, raw) as file:
            skip(file, start)
            return start + find_cut(file.read(offset - start))

    def is_eval(self, document: int) -> bool:
        """Whether the document with this number, counted over all inputs, is for evaluation."""
        if not self._fraction:
            return False
        p, q = self._fraction.numerator, self._fraction.denominator
        stratum = document * p // q
        if self._chosen[0] != stratum:
            first, end = -(-stratum * q // p), -(-(stratum + 1) * q // p)
            digest = hashlib.blake2b(f"{self._seed} {stratum}".encode(), digest_size=8).digest()
            place = int.from_bytes(digest, "little") % (end - first) if stratum else 1
            self._chosen = (stratum, first + place)
        return document == self._chosen[1]


# ------------------------------------------------------------------------------------------------
# Reading


def read_blocks(
    sources: Sequence[InputSource],
    wanted: Wanted,
    split: EvalSplit,
    start: Position,
    max_record: int = MAX_RECORD,
) -> Iterator[Block]:
    """All documents from `start` on, in order, in blocks of about 256 KiB; the last may be empty.

    wanted: the reader of a table's rows. max_record: bytes of one record. DataError if a source
    cannot be read, or has a longer one.
    """
    pieces: list[DocumentPart] = []
    size = 0
    at = start
    done = sum(source.size for source in sources[: start.source])
    for number in range(start.source, len(sources)):
        source = sources[number]
        try:
            for item in _read(source, wanted, at, split.offset, max_record):
                if len(item.text) > max_record and source.kind in (*TABLES, "dataset"):
                    raise too_long(item.where, max_record)
                is_eval = split.is_eval(at.document)
                if split.offset is not None:
                    is_eval = item.offset > split.offset
                is_start = source.kind != "text" or at.offset == 0
                at = Position(
                    source=number,
                    offset=item.offset,
                    line=item.line,
                    document=at.document + item.is_end,
                    skipped=at.skipped,
                    bytes_read=done + item.bytes_read,
                )
                pieces.append(DocumentPart(item.text, is_eval, item.is_end, item.where, is_start))
                size += len(item.text)
                if size >= PIECE_BYTES or len(pieces) >= BLOCK_PIECES:
                    yield Block(pieces, at)
                    pieces, size = [], 0
        except NotTextError:
            at = replace(at, skipped=at.skipped + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read '{source.path}': {error}") from error
        done += source.size
        at = replace(at, source=number + 1, offset=0, line=0, bytes_read=done)
    yield Block(pieces, at)


def _read(
    source: InputSource, wanted: Wanted, at: Position, cut: int | None, max_record: int
) -> Iterator[Item]:
    if source.kind == "text":
        return _read_text(source.path, source.size, at.offset, cut, lenient=source.in_folder)
    if source.kind in ("csv", "tsv"):
        return read_csv(source.path, wanted, at.offset)
    if source.kind == "parquet":
        return read_parquet(source.path, wanted, source.size, at.offset)
    if source.dataset is not None:
        return source.dataset.read(wanted, source.size, at.offset)
    return read_json(source.path, source.kind, at.offset, at.line, max_record)


# ------------------------------------------------------------------------------------------------
# Plain texts


class NotTextError(Exception):
    """A file in a folder is not text."""


def _read_text(path: str, size: int, offset: int, cut: int | None, lenient: bool) -> Iterator[Item]:
    """Pieces of a text from byte `offset` of its content on, also cut at byte `cut`, if given.

    size: the file's, in bytes. lenient: raise NotTextError if it is no text, else DataError.
    """
    with open(path, "rb") as raw, unpack(path, raw) as file:
        skip(file, offset)
        end = None if is_packed(path) else size  # a file that grows ends where it did
        data = b""
        while True:
            # A piece depends on its own offset only, so a resumed run makes the same ones.
            stop = cut if cut is not None and offset < cut else None
            wanted = PIECE_BYTES if stop is None else min(PIECE_BYTES, stop - offset)
            left = wanted + 1 if end is None else end - offset
            data += _read_bytes(
                path, file, min(wanted + 1, left) - len(data), complete=end is not None
            )
            if not data:
                return
            block, is_end = data[:wanted], len(data) <= wanted
            if not is_end and offset + wanted != stop:
                block = block[: find_cut(block) or None]  # a text without a boundary is not UTF-8
            text = _decode(path, offset, block, lenient)
            data, offset = data[len(block) :], offset + len(block)
            yield Item(text, is_end, offset, 0, raw.tell() if end is None else offset, path)


def _read_bytes(path: str, file: BinaryIO, count: int, *, complete: bool) -> bytes:
    """The next `count` bytes; at the end fewer or, if they must be complete, DataError."""
    parts = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    if complete and count > 0:
        raise DataError(f"'{path}' became shorter while it was read")
    return b"".join(parts)


def _decode(path: str, offset: int, data: bytes, lenient: bool) -> str:
    if lenient and offset == 0 and (b"\0" in data or is_html(path)):
        raise NotTextError
    try:
        return data.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        if lenient and offset == 0:
            raise NotTextError from error
        raise DataError(
            f"'{path}' is not UTF-8 text at byte {offset + error.start}: convert it "
            "(`iconv -t UTF-8`) or leave it out"
        ) from error


def find_cut(block: bytes) -> int:
    """The place to cut a part of a long UTF-8 text at so that its tokens stay the same.

    The best place is after a line end between two visible characters: there the usual byte-level
    vocabularies (GPT-2, Llama 3, Qwen) never have a token across. Otherwise it is after any line
    end, else before a space, all in the second half, else anywhere between two characters, but not
    inside `<|…|>`. 0 means that the block has no boundary between characters.
    """
    blank = b" \t\n\r\v\f"
    half = max(1, len(block) // 2)
    after_any_line_end = 0
    for at in _positions(block, b"\n", half):
        if block[at + 1] not in blank:
            if block[at - 1] not in blank:
                return at + 1
            after_any_line_end = after_any_line_end or at + 1
    if after_any_line_end:
        return after_any_line_end
    for at in _positions(block, b" ", half):
        if block[at + 1] not in blank and block[at - 1] not in blank:
            return at
    end = max(0, len(block) - 1)
    while end > 0 and block[end] & 0xC0 == 0x80:  # a continuation byte
        end -= 1
    bracket = block.rfind(b"<", max(1, end - 64), end)
    return bracket if bracket > 0 else end


def _positions(block: bytes, byte: bytes, start: int) -> Iterator[int]:
    """Places of a byte, from the last but one of the block back to `start`."""
    at = len(block) - 1
    while (at := block.rfind(byte, start, at)) >= 0:
        yield at
