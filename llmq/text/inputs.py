"""Inputs of `llmq tokenize`: files, folders, glob patterns, standard input and data sets.

Standard input is kept in a file while `llmq tokenize` runs, because three facts about the whole
content are needed before the first token is written: its format, the place of the evaluation part,
and a fingerprint to recognize it when an interrupted run resumes.

Documents are a stream that can be resumed anywhere. A document is a text file, a JSON record, a row
of a table, or a record of a data set (`base/records.py`). Memory is constant: a long text comes in
pieces of up to 256 KiB, cut at places that do not change tokens; Parquet is read one row group at a
time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from llmq.base.errors import ConfigError, DataError
from llmq.base.files import disk_errors, expand_pattern, read_errors
from llmq.base.records import (
    MAX_RECORD,
    READ_BYTES,
    TABLES,
    Item,
    Wanted,
    is_packed,
    json_layout,
    layout_of_name,
    packing_of,
    read_json,
    read_table,
    skip,
    too_long,
    unpack,
    unpacked_size,
)
from llmq.data.identity import MANIFEST, SHARD_NAME, read_manifest
from llmq.text.tokenizer import TEMPLATES, HfTokenizer

STANDARD_INPUT = "-"
_SPOOLED = re.compile(r"standard-input-[0-9a-f]{16}(\.gz|\.zst)?")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class InputSource:
    """An input file, or a data set. in_folder: True for a file of a given folder, which may be left
    out. dataset: the data set to stream; None for a file."""

    path: str
    kind: str  # text, jsonl, json, csv, tsv, parquet or dataset
    size: int  # bytes; 0 for a data set of unknown size
    mtime_ns: int  # for a data set, a hash of its content
    in_folder: bool
    dataset: HubDataset | None = None

    @property
    def identity(self) -> list[str | int]:
        """Absolute path (or name of the data set), size and time, by which a resumed run recognizes
        its inputs."""
        path = os.path.abspath(self.path) if self.dataset is None else self.path
        return [path, self.size, self.mtime_ns]


def find_sources(
    inputs: Sequence[str], dataset: HubDataset | None, exclude: Path
) -> list[InputSource]:
    """The data set as one source, or the files of `find_files`. ConfigError unless exactly one of
    inputs and dataset is given; DataError for a source that cannot be opened."""
    if bool(inputs) == (dataset is not None):
        raise ConfigError("give either files or --dataset")
    if dataset is None:
        return find_files(inputs, exclude)
    size, number = dataset.facts()
    return [InputSource(str(dataset), "dataset", size, number, False, dataset)]


def find_files(inputs: Sequence[str], exclude: Path) -> list[InputSource]:
    """Files that paths, folders and glob patterns name, each once; links are followed. Hidden
    files, the folder `exclude` (the output) and files written by `llmq tokenize` are left out.
    DataError for an input without files."""
    sources: dict[str, InputSource] = {}
    for name in inputs:
        if not name:
            raise ConfigError("an input has an empty name: give text files, folders or patterns")
        paths = expand_pattern(name)
        if not paths:
            raise DataError(f"input '{name}' is not there: give text files, folders or patterns")
        for path in paths:
            in_folder = path.is_dir()
            files = _walk(path, exclude) if in_folder else [path] * path.is_file()
            if not files:  # such as a pipe, which has neither a size nor a position to resume at
                raise DataError(f"'{path}' is not a file and holds no files, hidden ones left out")
            for file in files:
                place = os.path.abspath(file)
                if place not in sources or not in_folder:
                    sources[place] = _source(file, in_folder)
    return list(sources.values())


def _walk(folder: Path, exclude: Path) -> list[Path]:
    paths: list[Path] = []
    exclude = exclude.resolve()
    seen: set[tuple[int, int]] = set()  # links may reach a folder twice, or in a circle
    for name, folders, files in os.walk(folder, onerror=_unreadable, followlinks=True):
        parent = Path(name)
        stat = parent.stat()
        if (stat.st_dev, stat.st_ino) in seen:
            folders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        # Sorted, so that a folder with several paths is always found under the same path.
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and (parent / f).resolve() != exclude
        )
        written = _own_names(parent)
        paths += [
            parent / f
            for f in files
            if not f.startswith(".") and f not in written and (parent / f).is_file()
        ]
    return sorted(paths, key=os.fsencode)


def _own_names(folder: Path) -> Collection[str]:
    """Names of files that an earlier `llmq tokenize` has written into a folder."""
    if read_manifest(folder):
        return {MANIFEST, *(name for name in os.listdir(folder) if SHARD_NAME.fullmatch(name))}
    if folder.name == TEMPLATES:
        return os.listdir(folder) if _own_names(folder.parent) else ()
    copied = folder.name == "tokenizer" and read_manifest(folder.parent)
    return HfTokenizer.WRITTEN if copied else ()


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(
        f"cannot read the folder '{error.filename}': {error.strerror}; make it readable or leave "
        "it out"
    ) from error


def _source(path: Path, in_folder: bool) -> InputSource:
    kind = layout_of_name(path.name) or "text"
    if is_html(str(path)) and not in_folder:
        raise DataError(
            f"'{path}' is HTML, whose tags would be trained: write its text into a .txt file "
            "(`pandoc -t plain`), or rename it to .txt to train it as it is"
        )
    is_spooled = _SPOOLED.fullmatch(path.name) is not None
    if is_spooled or kind == "json":
        kind = _json_kind(path, in_folder or is_spooled)
    with read_errors(path):
        stat = path.stat()
    return InputSource(str(path), kind, stat.st_size, stat.st_mtime_ns, in_folder)


def is_html(path: str) -> bool:
    """True for the name of an HTML file, compressed or not."""
    return path.lower().removesuffix(".gz").removesuffix(".zst").endswith((".html", ".htm"))


def _json_kind(path: Path, in_folder: bool) -> str:
    """Kind of a .json file: "jsonl" or "json", or "text" for a file without records. in_folder:
    True for a file of a given folder; DataError for a file without records that was named
    itself."""
    try:
        kind = json_layout(str(path))
    except (OSError, EOFError, zlib.error):  # reported when the records are read
        return "jsonl"
    if kind is None and not in_folder:
        raise DataError(
            f"'{path}' holds neither an object on each line nor an array of objects: write it as "
            ".jsonl, or rename it to .txt to take it as a text"
        )
    return kind or "text"


# ------------------------------------------------------------------------------------------------
# Standard input


def reading_standard_input(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator of a function with arguments `inputs` and `out`, a folder: if an input is `-`, the
    content of standard input is kept as a file in `out` until the function returns. The file's
    name, size and time depend on the content alone, so that a resumed run recognizes the same
    content."""

    @functools.wraps(function)
    def run(inputs: Sequence[str], *, out: str | Path, **options: Any) -> Result:
        if STANDARD_INPUT not in inputs:
            return function(inputs, out=out, **options)
        if [*inputs].count(STANDARD_INPUT) > 1:
            raise DataError(f"'{STANDARD_INPUT}' is given twice: standard input can be read once")
        is_new = not Path(out).exists()
        spooled = _spool(Path(out))
        try:
            inputs = [str(spooled) if name == STANDARD_INPUT else name for name in inputs]
            return function(inputs, out=out, **options)
        finally:
            spooled.unlink(missing_ok=True)
            with suppress(OSError):  # the folder holds other files
                is_new and os.rmdir(out)

    return run


def _spool(folder: Path) -> Path:
    digest = hashlib.blake2b(digest_size=8)
    part = folder / f".standard-input-{os.getpid()}"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            begin = b""
            with open(part, "wb") as file:
                while block := sys.stdin.buffer.read(READ_BYTES):
                    begin = begin or block
                    digest.update(block)
                    file.write(block)
            os.utime(part, ns=(0, 0))
            name = f"standard-input-{digest.hexdigest()}{packing_of(begin)}"
            return part.rename(folder / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


# ------------------------------------------------------------------------------------------------
# Data sets


@dataclass(frozen=True, slots=True)
class HubDataset:
    """Data set that the library `datasets` streams. name: repository of Hugging Face's hub, or a
    folder. config: name of a configuration; None: the only one. split: name of a split, such as
    "train"."""

    name: str
    config: str | None
    split: str

    def __str__(self) -> str:
        config = "" if self.config is None else f":{self.config}"
        return f"data set {self.name}{config} ({self.split})"

    def facts(self) -> tuple[int, int]:
        """Size in bytes, 0 if unknown, and a hash of the content. DataError if the data set cannot
        be opened."""
        builder = self._builder()
        known = (builder.info.splits or {}).get(self.split)
        files = (builder.config.data_files or {}).get(self.split) or []
        # File names of the hub hold the revision; other files come with a time or a version.
        identity = [builder.hash, *files, getattr(files, "origin_metadata", None)]
        digest = hashlib.blake2b(repr(identity).encode(), digest_size=7).digest()
        return (known and known.num_bytes) or 0, int.from_bytes(digest, "little")

    def field_names(self) -> list[str] | None:
        """Names of the fields of all records, or of the first record; None for an empty data
        set."""
        stream = self._stream(self._builder())
        if stream.column_names is not None:
            return stream.column_names
        first = self._or_error(lambda: next(iter(stream), None))
        return None if first is None else list(first)

    def read(self, wanted: Wanted, size: int, row: int) -> Iterator[Item]:
        """Documents of the records behind the first `row` records, without empty documents. wanted:
        reader of records. size: bytes of the data set, from `facts`. DataError for a bad record, or
        if the network fails; the same command resumes."""
        builder = self._builder()
        stream = self._stream(builder)
        if stream.column_names is not None:
            stream = stream.select_columns([*wanted.columns(stream.column_names, f"'{self}'")])
        known = (builder.info.splits or {}).get(self.split)
        rows = (known and known.num_examples) or 0
        records = iter(stream.skip(row) if row else stream)
        while (record := self._or_error(lambda: next(records, None))) is not None:
            row += 1
            where = f"{self}: record {row}"
            if text := wanted.of(record, where):
                done = size * min(row, rows) // rows if rows else 0
                yield Item(text, True, row, row, done, where)

    def _builder(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise DataError("--dataset needs the library datasets: pip install datasets") from error
        return self._or_error(lambda: datasets.load_dataset_builder(self.name, self.config))

    def _stream(self, builder: Any) -> Any:
        return self._or_error(lambda: builder.as_streaming_dataset(split=self.split))

    def _or_error(self, function: Any) -> Any:
        try:
            return function()
        except Exception as error:  # the library, the network and damaged files raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"--dataset: cannot read the {self}: {reason[:500]}") from error


def dataset_of(spec: str | None, split: str | None) -> HubDataset | None:
    """Data set that `spec`, the value NAME[:CONFIG] of --dataset, and `split`, the value of
    --split, name; None without --dataset. A folder's name may have colons. ConfigError for --split
    alone."""
    if spec is None:
        if split is not None:
            raise ConfigError("--split: needs --dataset")
        return None
    name, colon, config = spec.rpartition(":")
    if not colon or os.path.isdir(spec):
        name, config = spec, None
    return HubDataset(name, config, split or "train")


class Portions(NamedTuple):
    """Limits of one step of reading and encoding."""

    size: int = 1 << 18  # bytes of a long text; small, so that Ctrl-C is prompt
    documents: int = 1024  # small documents in one block
    seconds: float = 15.0  # between saved states; an interruption loses at most this time


@dataclass(frozen=True, slots=True)
class Position:
    """Position in the inputs. source: index of the input. offset: position in this input, in bytes
    of the unpacked file, or in rows."""

    source: int = 0
    offset: int = 0
    line: int = 0  # lines of JSONL, or elements of an array, in front of the position
    document: int = 0  # documents in front of the position, over all sources
    skipped: int = 0  # files that were not text
    bytes_read: int = 0  # of all sources, before unpacking; for the progress bar


class DocumentPart(NamedTuple):
    """Document, or part of a document. text: str, or the bytes of a JSON record. other: for a
    record with a label, the record whose answer is compared with this record's answer; else
    None."""

    text: str | bytes
    is_eval: bool
    is_end: bool  # the document ends here
    where: str  # place of the document, for messages
    is_start: bool = True  # the document begins here
    other: DocumentPart | None = None


class Block(NamedTuple):
    """Parts of documents to encode together, and the position behind these parts."""

    pieces: list[DocumentPart]
    end: Position


# ------------------------------------------------------------------------------------------------
# Documents for evaluation


class EvalSplit:
    """Choice of the documents for evaluation: a fraction of all documents, or the last part of a
    single text. One of every 1/fraction documents is chosen, at random by the seed; the first is
    always the second document, so that two documents are enough for training and evaluation.

    offset: byte at which a single text's evaluation part begins; None for other inputs.
    """

    def __init__(self, fraction: float, seed: int, sources: Sequence[InputSource]) -> None:
        """fraction: share of the documents, 0 <= fraction < 1. sources: all inputs; a single text
        is read near the cut, to cut at the end of a line."""
        self._fraction = Fraction(fraction).limit_denominator(1_000_000)
        self._seed = seed
        self.offset: int | None = None
        if self._fraction and len(sources) == 1 and sources[0].kind == "text":
            self.offset = self._cut(sources[0])

    def _cut(self, source: InputSource) -> int:
        size = unpacked_size(source.path) if is_packed(source.path) else source.size
        offset = int(size * (1 - self._fraction))
        start = max(0, offset - Portions().size)
        with open(source.path, "rb") as raw, unpack(source.path, raw) as file:
            skip(file, start)
            return start + find_cut(file.read(offset - start))

    def is_eval(self, document: int) -> bool:
        """True if document number `document`, counted over all inputs, is for evaluation."""
        if not self._fraction:
            return False
        p, q = self._fraction.numerator, self._fraction.denominator
        stratum = document * p // q
        first, end = -(-stratum * q // p), -(-(stratum + 1) * q // p)
        digest = hashlib.blake2b(f"{self._seed} {stratum}".encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "little") % (end - first) if stratum else 1
        return document == first + place


# ------------------------------------------------------------------------------------------------
# Reading


def read_blocks(
    sources: Sequence[InputSource],
    wanted: Wanted,
    split: EvalSplit,
    start: Position,
    max_record: int = MAX_RECORD,
    portions: Portions = Portions(),
) -> Iterator[Block]:
    """Blocks of all documents from `start` on, in order; the last block may be empty. wanted:
    reader of a table's rows. max_record: maximum bytes of a record. DataError for a source that
    cannot be read, or that has a longer record."""
    pieces: list[DocumentPart] = []
    size = 0
    at = start
    done = sum(source.size for source in sources[: start.source])
    for number in range(start.source, len(sources)):
        source = sources[number]
        try:
            for item in _read(source, wanted, at, split.offset, max_record, portions.size):
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
                if size >= portions.size or len(pieces) >= portions.documents:
                    yield Block(pieces, at)
                    pieces, size = [], 0
        except NotTextError:
            at = replace(at, skipped=at.skipped + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read '{source.path}': {error}") from error
        done += source.size
        at = replace(at, source=number + 1, offset=0, line=0, bytes_read=done)
    yield Block(pieces, at)


def with_others(read: Callable[[Position], Iterator[Block]], start: Position) -> Iterator[Block]:
    """Blocks of records from `start` on, with `other` set to the next record of the inputs, also
    across blocks, training and evaluation; the first record follows the last one. read: function
    that returns the blocks from a position on. DataError if there is only one record."""
    pieces = (piece for at in (start, Position()) for block in read(at) for piece in block.pieces)
    next(pieces, None)
    for block in read(start):
        others = islice(pieces, len(block.pieces))
        paired = [p._replace(other=other) for p, other in zip(block.pieces, others, strict=True)]
        if any(piece.where == piece.other.where for piece in paired):
            raise DataError(
                f"{paired[0].where}: the only record, and an answer with a label is compared with "
                "that of another one: give two records or more"
            )
        yield block._replace(pieces=paired)


def _read(
    source: InputSource, wanted: Wanted, at: Position, cut: int | None, max_record: int, piece: int
) -> Iterator[Item]:
    if source.kind == "text":
        return read_text(source.path, source.size, at.offset, cut, piece, lenient=source.in_folder)
    if source.kind in TABLES:
        return read_table(source.path, wanted, source.size, at.offset)
    if source.dataset is not None:
        return source.dataset.read(wanted, source.size, at.offset)
    return read_json(source.path, source.kind, at.offset, at.line, max_record)


# ------------------------------------------------------------------------------------------------
# Plain texts


class NotTextError(Exception):
    """Signal that a file in a folder is not text."""


def read_text(
    path: str,
    size: int,
    offset: int = 0,
    cut: int | None = None,
    piece: int = Portions().size,
    *,
    lenient: bool = False,
) -> Iterator[Item]:
    """Pieces of a text file from byte `offset` of the content on. cut: a byte of the content at
    which a piece ends, or None. size: bytes of the file. piece: maximum bytes of a piece. lenient:
    True to raise NotTextError, instead of DataError, for a file that is no text."""
    with open(path, "rb") as raw, unpack(path, raw) as file:
        skip(file, offset)
        end = None if is_packed(path) else size  # bytes that are appended meanwhile are not read
        data = b""
        while True:
            # A piece depends only on its offset, so that a resumed run makes the same pieces.
            stop = cut if cut is not None and offset < cut else None
            wanted = piece if stop is None else min(piece, stop - offset)
            left = wanted + 1 if end is None else end - offset
            missing = max(min(wanted + 1, left) - len(data), 0)
            more = file.read(missing)
            if end is not None and len(more) < missing:
                raise DataError(f"'{path}' became shorter while it was read")
            data += more
            if not data:
                return
            block, is_end = data[:wanted], len(data) <= wanted
            if not is_end and offset + wanted != stop:
                block = block[: find_cut(block) or None]  # a text without a boundary is not UTF-8
            text = _decode(path, offset, block, lenient)
            data, offset = data[len(block) :], offset + len(block)
            yield Item(text, is_end, offset, 0, raw.tell() if end is None else offset, path)


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
    """Offset in bytes at which to cut a part of a long UTF-8 text, so that the cut changes no
    token; 0 for a block without a boundary between characters.

    The best place is behind a line end between two visible characters: no token of the usual
    byte-level vocabularies (GPT-2, Llama 3, Qwen) crosses such a place. The next choices in the
    second half are behind any line end, then in front of a space. The last choice is between any
    two characters, but not inside of `<|…|>`.
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
    """Offsets of `byte` in `block`, descending from the second-to-last offset to `start`."""
    at = len(block) - 1
    while (at := block.rfind(byte, start, at)) >= 0:
        yield at
