"""The documents of files and data sets, as a stream that can be resumed anywhere.

A text file is one document (`text_files.py`); each record of JSON and each row of Parquet is one
(`records.py`), and so is each record of a data set (`hub_dataset.py`). Memory is constant: a long
text comes in pieces of up to 256 KiB, Parquet is read one row group at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, NoReturn

from llmq.base.errors import ConfigError, DataError
from llmq.base.records import Item, Wanted, column_names, json_layout, read_json, read_parquet
from llmq.base.unpack import is_packed, skip, unpack, unpacked_size
from llmq.data import text_files
from llmq.data.hub_dataset import HubDataset
from llmq.data.identity import MANIFEST, SHARD_NAME, read_manifest
from llmq.data.patterns import expand_pattern
from llmq.data.record_text import RecordText
from llmq.data.standard_input import is_standard_input
from llmq.data.text_files import NotTextError, find_cut, read_text
from llmq.data.tokenizer import HfTokenizer

BLOCK_PIECES = 1024  # small documents that travel together

_JSON_NAME = re.compile(r".*\.(jsonl|ndjson|json)(\.gz|\.zst)?")


@dataclass(frozen=True, slots=True)
class Source:
    """One input file. in_folder: found by walking a folder, so it may be left out.

    dataset: None for a file. Its size may not be known (0), and its time is that of no clock.
    """

    path: str
    kind: str  # text, jsonl, json, parquet or dataset
    size: int  # bytes
    mtime_ns: int
    in_folder: bool
    dataset: HubDataset | None = None

    @classmethod
    def of_dataset(cls, dataset: HubDataset) -> Source:
        """Opens it, which may need the network. DataError if it cannot be opened."""
        size, number = dataset.facts()
        return cls(str(dataset), "dataset", size, number, False, dataset)

    @property
    def identity(self) -> list[str | int]:
        """By which an interrupted run knows its inputs again."""
        path = os.path.abspath(self.path) if self.dataset is None else self.path
        return [path, self.size, self.mtime_ns]


@dataclass(frozen=True, slots=True)
class Position:
    """Where reading goes on. offset: bytes (of the unpacked file), for Parquet rows."""

    source: int = 0
    offset: int = 0
    line: int = 0  # lines of JSONL before it, or elements of an array
    document: int = 0  # documents before it, over all sources
    skipped: int = 0  # files that were not text
    bytes_read: int = 0  # of all sources, as they lie on the disk; for the progress bar


class Piece(NamedTuple):
    """A document or a part of one. text: str, or bytes that hold a JSON record."""

    text: str | bytes
    is_eval: bool
    is_end: bool  # the document ends here
    where: str  # for messages
    is_start: bool = True  # the document begins here


class Block(NamedTuple):
    """Pieces to be encoded together, and where reading goes on after them."""

    pieces: list[Piece]
    end: Position


# ------------------------------------------------------------------------------------------------
# Which files


def find_sources(inputs: Sequence[str], dataset: HubDataset | None, exclude: Path) -> list[Source]:
    """What is to be read, either a data set or files as `find_files` finds them."""
    if bool(inputs) == (dataset is not None):
        raise ConfigError("give either files or --dataset")
    return [Source.of_dataset(dataset)] if dataset is not None else find_files(inputs, exclude)


def find_files(inputs: Sequence[str], exclude: Path) -> list[Source]:
    """The files that files, folders and glob patterns name, once each; links are followed.

    Hidden files, the folder `exclude` (the output) and, in folders, what `llmq tokenize` wrote are
    left out. DataError for an input that names nothing.
    """
    sources: dict[str, Source] = {}
    for name in inputs:
        paths = expand_pattern(name)
        if not paths:
            raise DataError(f"input '{name}' is not there: give text files, folders or patterns")
        for path in paths:
            in_folder = path.is_dir()
            files = _walk(path, exclude) if in_folder else [path] * path.is_file()
            if not files:  # of a pipe neither the size nor a place to resume at is known
                raise DataError(f"'{path}' is not a file and holds no files, hidden ones left out")
            for file in files:
                place = os.path.abspath(file)
                if place not in sources or not in_folder:
                    sources[place] = _source(file, in_folder)
    return list(sources.values())


def _walk(folder: Path, exclude: Path) -> list[Path]:
    found: list[Path] = []
    exclude = exclude.resolve()
    seen: set[tuple[int, int]] = set()  # links may lead to a folder twice, or in a circle
    for parent, folders, files in os.walk(folder, onerror=_unreadable, followlinks=True):
        here = Path(parent)
        stat = here.stat()
        if (stat.st_dev, stat.st_ino) in seen:
            folders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        # Sorted, so that it is always the same path under which a folder is seen first.
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and (here / f).resolve() != exclude
        )
        own = _own_names(here)
        found += [
            here / f
            for f in files
            if not f.startswith(".") and f not in own and (here / f).is_file()
        ]
    return sorted(found, key=os.fsencode)


def _own_names(folder: Path) -> Collection[str]:
    """Names of the files in a folder that an earlier `llmq tokenize` has written there."""
    if read_manifest(folder):
        return {MANIFEST, *(name for name in os.listdir(folder) if SHARD_NAME.fullmatch(name))}
    copied = folder.name == "tokenizer" and read_manifest(folder.parent)
    return HfTokenizer.FILES if copied else ()


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(
        f"cannot read the folder '{error.filename}': {error.strerror}; make it readable or leave "
        "it out"
    ) from error


def _source(path: Path, in_folder: bool) -> Source:
    name = path.name.lower()
    kind = "text"
    if is_standard_input(path):
        kind = json_layout(str(path)) or "text"
    elif json_name := _JSON_NAME.fullmatch(name):
        kind = _json_kind(path, in_folder) if json_name[1] == "json" else "jsonl"
    elif name.endswith((".parquet", ".pq")):
        kind = "parquet"
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
    return Source(str(path), kind, stat.st_size, stat.st_mtime_ns, in_folder)


def _json_kind(path: Path, in_folder: bool) -> str:
    """Of a .json file, which may hold anything; what has no records is a text in a folder."""
    try:
        kind = json_layout(str(path))
    except (OSError, EOFError, zlib.error):  # reading it will tell
        return "jsonl"
    if kind is None and not in_folder:
        raise DataError(
            f"'{path}' holds neither an object on each line nor an array of objects: write it as "
            ".jsonl, or rename it to .txt to take it as a text"
        )
    return kind or "text"


def having_fields(sources: Sequence[Source], text: RecordText) -> tuple[list[Source], list[str]]:
    """Leave out the JSON and Parquet files of folders that lack a field; what to warn of.

    Of JSON the first record decides. DataError if no such file is left: the field is wrong then.
    """
    fields = {source: field_names(source) if source.in_folder else None for source in sources}
    lacking = {s: names for s, names in fields.items() if names and text.missing(names)}
    kept = [source for source in sources if source not in lacking]
    only_texts = all(source.kind == "text" for source in kept)
    if not lacking:
        idle = only_texts and not text.is_default
        return kept, [f"{text.flag} has no effect: all inputs are plain text"] if idle else []
    first, names = next(iter(lacking.items()))
    if only_texts:
        raise text.lacks(f"'{first.path}'", names, "or leave the file out")
    said = f"{len(lacking)} files in folders have no field '{text.missing(names)}': left out"
    return kept, [f"{said}, the first is '{first.path}'"]


def field_names(source: Source) -> list[str] | None:
    """Of Parquet, a data set, or a JSON file's first record; None for a text, and if unreadable."""
    if source.kind == "text":
        return None
    if source.dataset is not None:
        return source.dataset.field_names()
    try:
        if source.kind == "parquet":
            return column_names(source.path)
        record = json.loads(next(read_json(source.path, source.kind, 0, 0)).text)
    except (OSError, EOFError, zlib.error, ValueError, StopIteration):  # reading it will tell
        return None
    return list(record) if isinstance(record, dict) else None


# ------------------------------------------------------------------------------------------------
# Which documents are for evaluation


class EvalSplit:
    """Sends a fraction of the documents to evaluation; of a single text its last part.

    Of every 1/fraction documents one is taken, at a place that depends on the seed; of the first
    1/fraction the second one, so that two documents are enough for both parts.
    """

    def __init__(self, fraction: float, seed: int, sources: Sequence[Source]) -> None:
        """fraction: 0 <= fraction < 1. May read a little of a single text, to cut it at a line."""
        self._fraction = Fraction(fraction).limit_denominator(1_000_000)
        self._seed = seed
        self._chosen = (-1, -1)  # of the stratum that was asked for last: its number, its document
        self.offset: int | None = None  # of a single text: where the evaluation part starts
        if self._fraction and len(sources) == 1 and sources[0].kind == "text":
            self.offset = self._cut(sources[0])

    def _cut(self, source: Source) -> int:
        size = unpacked_size(source.path) if is_packed(source.path) else source.size
        offset = int(size * (1 - self._fraction))
        start = max(0, offset - text_files.PIECE_BYTES)
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
    sources: Sequence[Source], wanted: Wanted, split: EvalSplit, start: Position
) -> Iterator[Block]:
    """All documents from `start` on, in order, in blocks of about 256 KiB; the last may be empty.

    wanted: of rows of tables. DataError for what cannot be read.
    """
    pieces: list[Piece] = []
    size = 0
    at = start
    done = sum(source.size for source in sources[: start.source])
    for number in range(start.source, len(sources)):
        source = sources[number]
        try:
            for item in _read(source, wanted, at, split.offset):
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
                pieces.append(Piece(item.text, is_eval, item.is_end, item.where, is_start))
                size += len(item.text)
                if size >= text_files.PIECE_BYTES or len(pieces) >= BLOCK_PIECES:
                    yield Block(pieces, at)
                    pieces, size = [], 0
        except NotTextError:
            at = replace(at, skipped=at.skipped + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read '{source.path}': {error}") from error
        done += source.size
        at = replace(at, source=number + 1, offset=0, line=0, bytes_read=done)
    yield Block(pieces, at)


def _read(source: Source, wanted: Wanted, at: Position, cut: int | None) -> Iterator[Item]:
    if source.kind == "text":
        return read_text(source.path, source.size, at.offset, cut, lenient=source.in_folder)
    if source.kind == "parquet":
        return read_parquet(source.path, wanted, source.size, at.offset)
    if source.dataset is not None:
        return source.dataset.read(wanted, source.size, at.offset)
    return read_json(source.path, source.kind, at.offset, at.line)
