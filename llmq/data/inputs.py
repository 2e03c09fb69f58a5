"""Inputs of `llmq tokenize`: files, folders, glob patterns, standard input and data sets.

Standard input is kept in a file while it is read. Its whole content has to be known before the
first token is written: whether it holds records, where its part for evaluation begins, and whether
an interrupted run has read the same.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from llmq.base.errors import ConfigError, DataError
from llmq.base.files import disk_errors
from llmq.base.records import Item, Wanted, json_layout, layout_of_name
from llmq.base.unpack import READ_BYTES, packing_of
from llmq.data.identity import MANIFEST, SHARD_NAME, read_manifest
from llmq.data.patterns import expand_pattern
from llmq.data.tokenizer import HfTokenizer

STANDARD_INPUT = "-"
_SPOOLED = re.compile(r"standard-input-[0-9a-f]{16}(\.gz|\.zst)?")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class InputSource:
    """One input file, or a data set.

    in_folder: found by walking a folder, so it may be left out. dataset: None for a file.
    """

    path: str
    kind: str  # text, jsonl, json, csv, tsv, parquet or dataset
    size: int  # bytes; a data set may say 0, for an unknown size
    mtime_ns: int  # a data set has a number here that differs for other contents
    in_folder: bool
    dataset: HubDataset | None = None

    @property
    def identity(self) -> list[str | int]:
        """Path, size and time, by which an interrupted run knows its inputs again."""
        path = os.path.abspath(self.path) if self.dataset is None else self.path
        return [path, self.size, self.mtime_ns]


def find_sources(
    inputs: Sequence[str], dataset: HubDataset | None, exclude: Path
) -> list[InputSource]:
    """List a data set, or the files of `find_files`. DataError if one cannot be opened."""
    if bool(inputs) == (dataset is not None):
        raise ConfigError("give either files or --dataset")
    if dataset is None:
        return find_files(inputs, exclude)
    size, number = dataset.facts()
    return [InputSource(str(dataset), "dataset", size, number, False, dataset)]


def find_files(inputs: Sequence[str], exclude: Path) -> list[InputSource]:
    """List the files that files, folders and glob patterns name, once each; links are followed.

    Hidden files, the folder `exclude` (the output) and files in folders that `llmq tokenize` wrote
    are left out. DataError for an input that names nothing.
    """
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
            if not files:  # a pipe has neither a size nor a place to resume at
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
        # Sorting makes the path under which a folder is seen first always the same.
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
    """Names of files that an earlier `llmq tokenize` has written into a folder."""
    if read_manifest(folder):
        return {MANIFEST, *(name for name in os.listdir(folder) if SHARD_NAME.fullmatch(name))}
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
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
    return InputSource(str(path), kind, stat.st_size, stat.st_mtime_ns, in_folder)


def is_html(path: str) -> bool:
    """Whether a file is HTML, by its name. Such files are no texts."""
    return path.lower().removesuffix(".gz").removesuffix(".zst").endswith((".html", ".htm"))


def _json_kind(path: Path, in_folder: bool) -> str:
    """The kind of a .json file, which may hold anything; in a folder it may be a text."""
    try:
        kind = json_layout(str(path))
    except (OSError, EOFError, zlib.error):  # reading it will report this
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
    """Decorate a function of inputs and of the folder `out`, so that `-` is standard input.

    It is kept in a file in `out` until the function returns. Name, size and time of the file follow
    from its content, so that a run that goes on knows it again.
    """

    @functools.wraps(function)
    def run(inputs: Sequence[str], *, out: str | Path, **options: Any) -> Result:
        if STANDARD_INPUT not in inputs:
            return function(inputs, out=out, **options)
        if [*inputs].count(STANDARD_INPUT) > 1:
            raise DataError(f"'{STANDARD_INPUT}' is given twice: standard input can be read once")
        made = not Path(out).exists()
        spooled = _spool(Path(out))
        try:
            inputs = [str(spooled) if name == STANDARD_INPUT else name for name in inputs]
            return function(inputs, out=out, **options)
        finally:
            spooled.unlink(missing_ok=True)
            with suppress(OSError):  # it holds other files
                made and os.rmdir(out)

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
    """Records that the library `datasets` streams.

    name: a data set of the hub, or a folder. config: one of its configurations, None: the only one.
    """

    name: str
    config: str | None
    split: str

    def __str__(self) -> str:
        config = "" if self.config is None else f":{self.config}"
        return f"data set {self.name}{config} ({self.split})"

    def facts(self) -> tuple[int, int]:
        """Bytes, 0 if unknown, and a number that differs for other contents. DataError."""
        builder = self._builder()
        known = (builder.info.splits or {}).get(self.split)
        files = (builder.config.data_files or {}).get(self.split) or []
        # The hub's file names hold the revision; other files come with a time or a version.
        identity = [builder.hash, *files, getattr(files, "origin_metadata", None)]
        digest = hashlib.blake2b(repr(identity).encode(), digest_size=7).digest()
        return (known and known.num_bytes) or 0, int.from_bytes(digest, "little")

    def field_names(self) -> list[str] | None:
        """Fields of its first record or of all; None if it is empty."""
        builder = self._builder()
        stream = self._or_error(lambda: builder.as_streaming_dataset(split=self.split))
        if stream.column_names is not None:
            return stream.column_names
        first = self._or_error(lambda: next(iter(stream), None))
        return None if first is None else list(first)

    def read(self, wanted: Wanted, size: int, row: int) -> Iterator[Item]:
        """Documents that `wanted` makes of the records behind `row` rows, without empty ones.

        size: that of `facts`. DataError, also if the network fails; the same command then goes on.
        """
        builder = self._builder()
        stream = self._or_error(lambda: builder.as_streaming_dataset(split=self.split))
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

    def _or_error(self, function: Any) -> Any:
        try:
            return function()
        except Exception as error:  # the library, the network and damaged files raise anything
            said = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"--dataset: cannot read the {self}: {said[:500]}") from error


def dataset_of(spec: str | None, split: str | None) -> HubDataset | None:
    """Parse --dataset NAME[:CONFIG] and --split; a folder may have colons in its name."""
    if spec is None:
        if split is not None:
            raise ConfigError("--split: needs --dataset")
        return None
    name, colon, config = spec.rpartition(":")
    if not colon or os.path.isdir(spec):
        name, config = spec, None
    return HubDataset(name, config, split or "train")
