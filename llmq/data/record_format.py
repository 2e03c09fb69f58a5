"""Records are texts or conversations of one shape, chosen by their fields or by --format.

All records of a run have the same format. It is decided before anything is written, by the first
record of each JSON file and by the columns of tables.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

from llmq.base.errors import ConfigError, DataError
from llmq.base.records import TABLES, column_names, read_json
from llmq.data.conversations import (
    CLASSES,
    FORMATS,
    LABELS,
    PAIRS,
    REQUIRED,
    TEXT,
    RecordConversation,
)
from llmq.data.inputs import InputSource
from llmq.data.record_text import RecordText


def choose_format(
    sources: Sequence[InputSource], form: str, text: RecordText
) -> tuple[RecordText | RecordConversation, list[InputSource], list[str]]:
    """Choose the reader of all records; returns it, the files to read, and warnings.

    form: one of FORMATS, else ConfigError. text: the reader of texts. DataError if files contradict
    each other or the format.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format is {form}: give {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if form == "auto":
        form = TEXT if not text.is_default else _recognised(sources, text)
    if form == TEXT:
        return text, *having_fields(sources, text)
    kept, warnings = _having(sources, form)
    if not text.is_default:
        warnings.append(f"{text.flag} has no effect: the inputs are conversations")
    return RecordConversation(form), kept, warnings


def _recognised(sources: Sequence[InputSource], text: RecordText) -> str:
    found: dict[str, InputSource] = {}
    for source in sources:
        fields = field_names(source) or []
        forms = [TEXT] * (text.field in fields)
        forms += [
            n
            for n, needs in REQUIRED.items()
            if n not in (LABELS, CLASSES) and {*needs} <= {*fields}
        ]
        if PAIRS in forms:  # whose prompt may be a field of another format
            forms = [PAIRS]
        if len(forms) > 1:
            raise DataError(
                f"'{source.path}' has fields of several formats ({', '.join(forms)}): choose one "
                "with --format"
            )
        for form in forms:
            found.setdefault(form, source)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise DataError(
            f"'{first.path}' is of the format {one} and '{second.path}' of {other}: tokenize them "
            "one by one, or choose one with --format"
        )
    return next(iter(found), TEXT)


def _having(sources: Sequence[InputSource], form: str) -> tuple[list[InputSource], list[str]]:
    """Keep the files of this format; returns them and warnings.

    Files in folders may be left out, others raise DataError.
    """
    kept, left_out = [], []
    for source in sources:
        fields = field_names(source)
        if source.kind != "text" and (fields is None or {*REQUIRED[form]} <= {*fields}):
            kept.append(source)
        elif source.in_folder:
            left_out.append(source)
        elif source.kind == "text":
            raise DataError(
                f"'{source.path}' is a text: conversations are read of JSON lines, JSON and tables"
            )
        else:
            RecordConversation(form).columns(fields or [], f"'{source.path}'")
    if not kept:
        raise DataError(f"no file has records of --format {form}: give JSON lines, JSON or tables")
    if not left_out:
        return kept, []
    return kept, [
        f"{len(left_out)} files in folders hold no conversations of the format {form}: left out, "
        f"the first is '{left_out[0].path}'"
    ]


def having_fields(
    sources: Sequence[InputSource], text: RecordText
) -> tuple[list[InputSource], list[str]]:
    """Leave out records of files in folders that lack a field; returns the rest and warnings.

    The first record of a JSON file decides. DataError, for a wrong field, if no such file is left.
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


def field_names(source: InputSource) -> list[str] | None:
    """Fields of a table, or of a JSON file's first record; None for texts and unreadable files."""
    if source.kind == "text":
        return None
    if source.dataset is not None:
        return source.dataset.field_names()
    try:
        if source.kind in TABLES:
            return column_names(source.path)
        record = json.loads(next(read_json(source.path, source.kind, 0, 0)).text)
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        StopIteration,
    ):  # reading it will report this
        return None
    return list(record) if isinstance(record, dict) else None
