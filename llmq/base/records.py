"""The records of JSON lines, of JSON arrays and of Parquet, one after the other, from any place on.

JSON is not parsed here: where a record ends is all that has to be known.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple, Protocol

from llmq.base.errors import DataError
from llmq.base.unpack import READ_BYTES, skip, unpack

BATCH_ROWS = 1024  # of Parquet at once


class Item(NamedTuple):
    """A document or a part of one. text: str, or bytes that hold a JSON record."""

    text: str | bytes
    is_end: bool  # the document ends here
    offset: int  # where reading goes on: bytes of the unpacked file, rows of Parquet
    line: int  # of the file so far, for an array records
    bytes_read: int  # of this file, as it lies on the disk
    where: str  # for messages


# ------------------------------------------------------------------------------------------------
# JSON

_BLANK = b" \t\r\n\xef\xbb\xbf"  # with the byte order mark
# What lies between two elements of an array, before the first or behind the last.
_GAP = re.compile(rb"[%b]*(\[?)[%b]*([,\]]?)[%b]*" % (_BLANK, _BLANK, _BLANK))
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[\[\]{}]', re.DOTALL)  # a string may be cut off


def json_layout(path: str) -> str | None:
    """Where a JSON file has its records: "jsonl", one on each line, or "json", in one array.

    None if it begins like neither. Raises what reading the file raises.
    """
    with open(path, "rb") as raw, unpack(path, raw) as file:
        first = _next_byte(file)
        if first == b"[":
            return "json" if _next_byte(file) in (b"{", b"]") else None
        try:
            is_record = not first or isinstance(json.loads(first + file.readline()), dict)
        except ValueError:
            return None
        return "jsonl" if is_record else None


def _next_byte(file: BinaryIO) -> bytes:
    """The next one that is not blank, b"" at the end."""
    while (byte := file.read(1)) and byte in _BLANK:
        pass
    return byte


def read_json(path: str, layout: str, offset: int, line: int) -> Iterator[Item]:
    """The records as bytes. layout: of json_layout. offset, line: as in the Item read before."""
    with open(path, "rb") as raw, unpack(path, raw) as file:
        skip(file, offset)
        is_array = layout == "json"
        for text, end in elements(path, file, offset) if is_array else _lines(file, offset):
            line += 1
            if text.strip():
                where = f"{path}: record {line}" if is_array else f"{path}:{line}"
                yield Item(text, True, end, line, end if file is raw else raw.tell(), where)


def _lines(file: BinaryIO, offset: int) -> Iterator[tuple[bytes, int]]:
    for text in file:
        offset += len(text)
        yield text, offset


def elements(
    path: str, file: BinaryIO, offset: int, *, growing: bool = False
) -> Iterator[tuple[bytes, int]]:
    """The objects in an array and where each ends. offset: of the file's start or such an end.

    growing: the array may stop anywhere, as one does that is still written. path: for messages.
    """
    data, start = b"", 0  # what was read last, and how much of it is done with
    bracket, comma = (b"", b",") if offset else (b"[", b"")
    at_end = False
    while True:
        gap = _GAP.match(data, start)
        next_byte = data[gap.end() : gap.end() + 1]
        begins = next_byte == b"{" and gap.groups() == (bracket, comma)
        end = _end_of_object(data, gap.end()) if begins else 0
        if end:
            yield data[gap.end() : end], offset + end
            start, bracket, comma = end, b"", b","
            continue
        is_over = not next_byte and gap.groups() == (bracket, b"]")
        may_go_on = growing and (begins or not next_byte)
        if at_end and (is_over or may_go_on):
            return
        if at_end or (next_byte and not begins):
            raise DataError(
                f"'{path}' is no array of JSON objects from byte {offset + start} on: mend it, or "
                "write one object on each line"
            )
        more = file.read(max(READ_BYTES, len(data) - start))
        data, start, offset, at_end = data[start:] + more, 0, offset + start, not more


def _end_of_object(data: bytes, start: int) -> int:
    """Behind the object that begins at `start`; 0 if its end is not there."""
    depth = 0
    for token in _TOKEN.finditer(data, start):
        byte = token[0][:1]
        if byte == b'"':
            if not token[1]:
                return 0
            continue
        depth += 1 if byte in b"[{" else -1
        if depth == 0:
            return token.end()
    return 0


# ------------------------------------------------------------------------------------------------
# Parquet


def column_names(path: str) -> list[str]:
    """Of a Parquet file. Raises what reading it raises."""
    return _pyarrow(path, "pyarrow.parquet").read_schema(path).names


class Wanted(Protocol):
    """What is made of a record."""

    def columns(self, there: Sequence[str], where: str) -> Sequence[str]:
        """The fields to read, of those that are there. DataError for missing ones."""

    def of(self, record: Mapping[str, Any], where: str) -> str | bytes:
        """A document, empty for none. DataError, which begins with `where`, for bad values."""


def read_parquet(path: str, wanted: Wanted, size: int, row: int) -> Iterator[Item]:
    """What is made of each row, without the empty ones. size: of the file in bytes.

    row: where to begin.
    """
    arrow_error = _pyarrow(path, "pyarrow").ArrowException
    try:
        file = _pyarrow(path, "pyarrow.parquet").ParquetFile(path)
        rows = file.metadata.num_rows
        columns = [*wanted.columns(file.schema_arrow.names, f"'{path}'")]
        first = 0  # row of the group
        for group in range(file.num_row_groups):
            end = first + file.metadata.row_group(group).num_rows
            at = first
            first = end
            if end <= row:
                continue
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
                for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    at += 1
                    if at > row:
                        where = f"{path}: row {at}"
                        record = dict(zip(batch.schema.names, values, strict=True))
                        if text := wanted.of(record, where):
                            yield Item(text, True, at, 0, size * at // rows, where)
    except arrow_error as error:
        raise DataError(f"cannot read '{path}': {error}") from error


def read_rows(path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of Parquet as JSON's types, each with where it is, for messages."""
    arrow_error = _pyarrow(path, "pyarrow").ArrowException
    row = 0
    try:
        for batch in _pyarrow(path, "pyarrow.parquet").ParquetFile(path).iter_batches(BATCH_ROWS):
            for record in batch.to_pylist():
                row += 1
                yield record, f"{path}: row {row}"
    except arrow_error as error:
        raise DataError(f"cannot read '{path}': {error}") from error


def _pyarrow(path: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"reading '{path}' needs pyarrow: pip install pyarrow") from error
