"""A plain text in pieces, from any place on: each is cut where that does not change the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from llmq.base.errors import DataError
from llmq.base.records import Item
from llmq.base.unpack import is_packed, skip, unpack

PIECE_BYTES = 1 << 18  # of a long text that are read at once; small, so that Ctrl-C is prompt


class NotTextError(Exception):
    """A file in a folder is not text."""


def read_text(path: str, size: int, offset: int, cut: int | None, lenient: bool) -> Iterator[Item]:
    """Pieces of a text. It is also cut at `cut`, if that is given.

    size: of the file in bytes; offset, cut: bytes of its content. lenient: raise NotTextError for
    what is no text, else DataError.
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
            data += _read(path, file, min(wanted + 1, left) - len(data), complete=end is not None)
            if not data:
                return
            block, is_end = data[:wanted], len(data) <= wanted
            if not is_end and offset + wanted != stop:
                block = block[: find_cut(block) or None]  # without a boundary: not UTF-8
            text = _decode(path, offset, block, lenient)
            data, offset = data[len(block) :], offset + len(block)
            yield Item(text, is_end, offset, 0, raw.tell() if end is None else offset, path)


def _read(path: str, file: BinaryIO, count: int, *, complete: bool) -> bytes:
    """The next `count` bytes; fewer at the end, DataError with `complete`."""
    parts = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    if complete and count > 0:
        raise DataError(f"'{path}' became shorter while it was read")
    return b"".join(parts)


def _decode(path: str, offset: int, data: bytes, lenient: bool) -> str:
    if lenient and offset == 0 and b"\0" in data:
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
    """Where to cut a part of a long UTF-8 text so that its tokens stay the same.

    The best place is after a line end between two visible characters: there the usual byte-level
    vocabularies (GPT-2, Llama 3, Qwen) never have a token across. Then after any line end, then
    before a space, then anywhere between two characters, but not inside `<|…|>`. The first three
    are looked for in the second half. 0 only for a block without a boundary between characters.
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
    """Where a byte is, from the last but one place of the block back to `start`."""
    at = len(block) - 1
    while (at := block.rfind(byte, start, at)) >= 0:
        yield at
