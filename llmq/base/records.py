"""Read records from JSON lines, JSON arrays, Parquet, CSV and TSV, in order, from any offset on.

Files may be compressed (packed) with gzip or Zstandard. Reading finds only the ends of JSON
records; the caller parses them.
"""

import csv
import gzip
import importlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import BufferedReader
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple, Protocol

from llmq.base.errors import DataError

_MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}  # magic numbers of RFC 1952 and RFC 8878
PACKED = tuple(_MAGIC)
READ_BYTES = 1 << 18  # number of bytes that one read takes from a file
# bytes of Zstandard in one read; their content may be thousands of times longer
_PACKED_BYTES = 1 << 12
MOST_RATIO = 500  # bytes of content that a packed byte may give; text has 2 to 20
_FREE_BYTES = 64 << 20  # MOST_RATIO applies only to content beyond this many bytes


def is_packed(path: str) -> bool:
    """True if `unpack` decompresses files of this name."""
    return path.lower().endswith(PACKED)


def packing_of(begin: bytes) -> str:
    """Return the suffix (.gz, .zst) for a file whose content begins with these bytes; "" if it is
    not packed."""
    return next((ending for ending, magic in _MAGIC.items() if begin.startswith(magic)), "")


def unpack(path: str, raw: io.BufferedReader) -> io.BufferedReader:
    """Return the decompressed content of an open file whose name ends in a packed suffix; `raw`
    itself for any other name. Reading raises OSError, EOFError or zlib.error for damage, and
    DataError for a missing library or a decompression bomb (MOST_RATIO)."""
    if path.lower().endswith(".gz"):
        pieces = iter(partial(gzip.GzipFile(fileobj=raw).read1, READ_BYTES), b"")
    elif path.lower().endswith(".zst"):
        pieces = _of_frames(raw, _library(path, "zstandard"))
    else:
        return raw
    return io.BufferedReader(_Unpacked(path, raw, pieces), READ_BYTES)


def skip(file: BinaryIO, count: int) -> None:
    """Skip `count` bytes of a newly opened file; a file that cannot seek is read."""
    if file.seekable():
        file.seek(count)
        return
    for skipped in range(0, count, READ_BYTES):
        file.read(min(READ_BYTES, count - skipped))


def unpacked_size(path: str) -> int:
    """Return the number of decompressed bytes, which needs reading the whole file."""
    size = 0
    with open(path, "rb") as raw, unpack(path, raw) as file:
        while block := file.read(READ_BYTES):
            size += len(block)
    return size


class _Unpacked(io.RawIOBase):
    """The content of a packed file; reading raises DataError if the content is too long for the
    packed bytes."""

    def __init__(self, path: str, raw: BinaryIO, pieces: Iterator[bytes]) -> None:
        self._path, self._raw, self._pieces = path, raw, pieces
        self._piece, self._bytes = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        self._piece = self._piece or memoryview(next(self._pieces, b""))
        count = min(len(target), len(self._piece))
        target[:count], self._piece = self._piece[:count], self._piece[count:]
        self._bytes += count
        if self._bytes > max(_FREE_BYTES, MOST_RATIO * self._raw.tell()):
            raise DataError(
                f"'{self._path}' holds more than {MOST_RATIO} times its own size, as no text does: "
                "leave it out, or unpack it"
            )
        return count


def _of_frames(raw: BinaryIO, zstandard: ModuleType) -> Iterator[bytes]:
    """Yield the content of Zstandard frames in chunks. The library's own reader does not report a
    file that ends inside a frame."""
    frame, packed = None, b""
    while packed := packed or raw.read(_PACKED_BYTES):
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            piece = frame.decompress(packed)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if piece:
            yield piece
    if frame is not None:
        raise EOFError("it ends in the middle of a Zstandard frame")


def _library(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(f"reading '{path}' needs {package}: pip install {package}") from error


TABLES = ("parquet", "csv", "tsv")  # file layouts that begin with column names
BATCH_ROWS = 1024  # number of Parquet rows in one read
_NAME = re.compile(r".*\.(jsonl|ndjson|json|csv|tsv)(\.gz|\.zst)?")


def layout_of_name(name: str) -> str | None:
    """Return "jsonl", "json", "csv", "tsv" or "parquet" for a file's name; None for other names."""
    if name.lower().endswith((".parquet", ".pq")):
        return "parquet"
    match = _NAME.fullmatch(name.lower())
    return match and {"ndjson": "jsonl"}.get(match[1], match[1])


class Item(NamedTuple):
    """A document or a part of it. text: a str, or the bytes of a JSON record."""

    text: str | bytes
    is_end: bool  # True if the document ends here
    offset: int  # where reading may continue: bytes of the unpacked file, or rows of a table
    line: int  # number of lines read so far; in an array the number of records
    bytes_read: int  # bytes read of the file as stored on the disk
    where: str  # the place, for messages


# ------------------------------------------------------------------------------------------------
# JSON

_BLANK = b" \t\r\n\xef\xbb\xbf"  # white space and the byte order mark
# _GAP matches the characters between two elements of an array, before the first or behind the last.
_GAP = re.compile(rb"[%b]*(\[?)[%b]*([,\]]?)[%b]*" % (_BLANK, _BLANK, _BLANK))
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[\[\]{}]', re.DOTALL)  # the end may cut off a string


MAX_RECORD = 64 << 20  # most bytes of a record, unless --max-record is given


def json_layout(path: str) -> str | None:
    """Return the layout of a JSON file: "jsonl" for a record on each line, "json" for an array of
    records, None if the file begins like neither. Raises the errors of reading the file."""
    with open(path, "rb") as raw, unpack(path, raw) as file:
        first = _next_byte(file)
        if first == b"[":
            return "json" if _next_byte(file) in (b"{", b"]") else None
        line = file.readline(MAX_RECORD)
        try:
            is_record = not first or isinstance(json.loads(first + line), dict)
        except ValueError:  # `read_json` will report a line that is too long
            return "jsonl" if len(line) == MAX_RECORD and first == b"{" else None
        return "jsonl" if is_record else None


def _next_byte(file: BufferedReader) -> bytes:
    """Return the next byte that is not white space; b"" at the end."""
    while block := file.peek():
        text = block.lstrip(_BLANK)
        file.read(len(block) - len(text))
        if text:
            return file.read(1)
    return b""


def read_json(
    path: str, layout: str, offset: int, line: int, max_record: int = MAX_RECORD
) -> Iterator[Item]:
    """Yield the records of a JSON file as bytes. layout: the result of json_layout. offset, line:
    the fields of the last Item that was read; 0 at first. max_record: most bytes of a record;
    DataError for a longer record, which is not read."""
    with open(path, "rb") as raw, unpack(path, raw) as file:
        skip(file, offset)
        is_array = layout == "json"
        if is_array:
            records = elements(path, file, offset, max_record=max_record)
        else:
            records = _lines(file, offset, max_record)
        for text, end in records:
            line += 1
            where = f"{path}: record {line}" if is_array else f"{path}:{line}"
            if len(text.rstrip(b"\r\n")) > max_record:
                raise too_long(where, max_record)
            if text.strip():
                yield Item(text, True, end, line, end if file is raw else raw.tell(), where)


def too_long(where: str, max_record: int) -> DataError:
    """Return the error for a record of more than max_record bytes."""
    return DataError(
        f"{where}: a record of more than {max_record:,} bytes: leave it out, or raise --max-record"
    )


def _lines(file: BinaryIO, offset: int, max_record: int) -> Iterator[tuple[bytes, int]]:
    """Yield each line and the offset of its end. A line that is too long is cut, but stays longer
    than max_record."""
    while text := file.readline(max_record + 3):  # the 3 are \r\n and a byte too many
        offset += len(text)
        yield text, offset


def elements(
    path: str, file: BinaryIO, offset: int, *, growing: bool = False, max_record: int = MAX_RECORD
) -> Iterator[tuple[bytes, int]]:
    """Yield the objects in an array, each with the offset of the object's end. offset: where `file`
    begins: 0, or an offset that was yielded before. growing: True if the array may stop anywhere
    because another process still writes the file. path: the file's path for messages. Raises
    DataError if an element is no object, or has more than max_record bytes."""
    data, start = b"", 0  # the bytes of the last read, and the number of them that are done
    bracket, comma = (b"", b",") if offset else (b"[", b"")
    at_end = False
    while True:
        gap = _GAP.match(data, start)
        next_byte = data[gap.end() : gap.end() + 1]
        begins = next_byte == b"{" and gap.groups() == (bracket, comma)
        end = _end_of_object(data, gap.end()) if begins else 0
        read = (end or len(data)) - (gap.end() if begins else start)
        if read > max_record and (begins or not next_byte):
            raise too_long(f"'{path}' at byte {offset + start}", max_record)
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
    """Return the offset behind the object that begins at `start`; 0 if data does not hold the
    object's end."""
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
# Tables: CSV, TSV and Parquet


def column_names(path: str) -> list[str]:
    """Return the names of a table's columns. Raises the errors of reading the table."""
    if layout_of_name(path) != "parquet":
        with open(path, "rb") as raw:
            return _columns(path, _csv_rows(path, raw))
    return _library(path, "pyarrow.parquet").read_schema(path).names


class Wanted(Protocol):
    """The interface of a caller that makes documents from records."""

    def columns(self, there: Sequence[str], where: str) -> Sequence[str]:
        """Return the fields to read, chosen from the existing fields `there`. Raises DataError for
        missing fields."""

    def of(self, record: Mapping[str, Any], where: str) -> str | bytes:
        """Return the document of a record; empty text if the record gives none. Raises DataError,
        which begins with `where`, for bad values."""


def read_table(path: str, wanted: Wanted, size: int, row: int) -> Iterator[Item]:
    """Yield the document that `wanted` makes of each row, without empty documents. size: bytes of
    the file. row: number of rows to skip."""
    columns = partial(wanted.columns, where=f"'{path}'")
    for number, read, record in _rows(path, columns, size, row):
        where = f"{path}: row {number}"
        if text := wanted.of(record, where):
            yield Item(text, True, number, 0, read, where)


def read_rows(path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a table as JSON types, each with its place for messages."""
    for number, _, record in _rows(path, list, 0, 0):
        yield record, f"{path}: row {number}"


def _rows(
    path: str, choose: Callable[[list[str]], Sequence[str]], size: int, row: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield each row's number from 1, the bytes read of the file, and the row's columns. choose:
    function of the columns' names that returns the columns to read; called before the first row.
    size: bytes of the file. row: number of rows to skip; whole row groups of Parquet are skipped
    without reading."""
    if layout_of_name(path) == "parquet":
        yield from _parquet_rows(path, choose, size, row)
        return
    with open(path, "rb") as raw:
        rows = _csv_rows(path, raw)
        names = _columns(path, rows)
        choose(names)
        for number, values in enumerate(rows, 1):
            if number <= row:
                continue
            if len(values) != len(names):
                counts = f"{len(values)} fields instead of {len(names)}"
                raise DataError(f"{path}: row {number}: {counts}, as the first line")
            yield number, raw.tell(), dict(zip(names, values, strict=True))


def _csv_rows(path: str, raw: BinaryIO) -> Iterator[list[str]]:
    """Yield the column names, then the values of each row that is not blank. The separator of TSV
    is a tab; in CSV it is the comma, semicolon or tab that the first line has most often."""
    with unpack(path, raw) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        try:
            first = text.readline()
            between = "\t" if layout_of_name(path) == "tsv" else max(",;\t", key=first.count)
            csv.field_size_limit(1 << 30)  # the library's limit of 128 KiB is too short for texts
            lines = (line for part in ([first], text) for line in part)
            yield from filter(None, csv.reader(lines, delimiter=between, strict=True))
        except csv.Error as error:
            raise DataError(f"'{path}' is not readable as a table: {error}; mend it") from error
        except UnicodeDecodeError as error:
            raise DataError(f"'{path}' is not UTF-8 text: convert it (`iconv -t UTF-8`)") from error


def _columns(path: str, rows: Iterator[list[str]]) -> list[str]:
    names = next(rows, [])
    if len({*names}) < len(names):
        raise DataError(f"'{path}': its first line names a column twice")
    return names


def _parquet_rows(
    path: str, choose: Callable[[list[str]], Sequence[str]], size: int, row: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    arrow_error = _library(path, "pyarrow").ArrowException
    try:
        file = _library(path, "pyarrow.parquet").ParquetFile(path)
        rows = file.metadata.num_rows
        columns = [*choose(file.schema_arrow.names)]
        first = 0  # number of the first row in the row group
        for group in range(file.num_row_groups):
            end = first + file.metadata.row_group(group).num_rows
            number = first
            first = end
            if end <= row:
                continue
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
                for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    number += 1
                    if number > row:
                        record = dict(zip(batch.schema.names, values, strict=True))
                        yield number, size * number // rows, record
    except arrow_error as error:
        raise DataError(f"cannot read '{path}': {error}") from error


# ------------------------------------------------------------------------------------------------
# The content of one JSON record


def json_record(line: bytes, where: str) -> dict[str, Any]:
    """Return the object in a line of JSON. Raises DataError, which begins with `where`, if the line
    is no JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not readable as JSON: {error}; mend or remove it") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(f"{where}: a {kind} instead of a JSON object on each line")
    return record


HALVES = "half a character (a lone surrogate) in a text, for which U+FFFD stands"


def whole_characters(text: str, line: str | bytes) -> str:
    """Return the text with U+FFFD for lone surrogates, which JSON in bytes can hold. line: the JSON
    from which the text was parsed."""
    may_hold = isinstance(line, bytes) and b"\\ud" in line.lower()
    return mended(text) if may_hold else text


def mended(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates (halves of a UTF-16 pair), which UTF-8 cannot
    hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
