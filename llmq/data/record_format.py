"""Whether records are texts or conversations, and of which shape: by their fields, or by --format.

All records of a run have the same format. It is decided before anything is written, by the first
record of each JSON file and by the columns of tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmq.base.errors import DataError
from llmq.data.conversations import (
    REQUIRED,
    TEXT,
    RecordConversation,
    check_format,
    formats_of,
)
from llmq.data.documents import Source, field_names, having_fields
from llmq.data.record_text import RecordText

Chosen = tuple[RecordText | RecordConversation, list[Source], list[str]]


def choose_format(sources: Sequence[Source], form: str, text: RecordText) -> Chosen:
    """What is read of all records, the files to read, and what to warn of.

    form: of conversations.FORMATS. text: what is read of texts. DataError where files contradict
    each other or the format.
    """
    if check_format(form) == "auto":
        form = TEXT if not text.is_default else _recognised(sources, text)
    if form == TEXT:
        return text, *having_fields(sources, text)
    kept, warnings = _having(sources, form)
    if not text.is_default:
        warnings.append(f"{text.flag} has no effect: the inputs are conversations")
    return RecordConversation(form), kept, warnings


def _recognised(sources: Sequence[Source], text: RecordText) -> str:
    found: dict[str, Source] = {}
    for source in sources:
        fields = field_names(source) or []
        forms = [TEXT] * (text.field in fields) + formats_of(fields)
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


def _having(sources: Sequence[Source], form: str) -> tuple[list[Source], list[str]]:
    """The files of this format; those of folders that are of no such format are left out."""
    kept, left_out = [], []
    for source in sources:
        fields = field_names(source)
        if source.kind != "text" and (fields is None or {*REQUIRED[form]} <= {*fields}):
            kept.append(source)
        elif source.in_folder:
            left_out.append(source)
        elif source.kind == "text":
            raise DataError(
                f"'{source.path}' is a text: conversations are read of JSON lines, JSON, Parquet"
            )
        else:
            RecordConversation(form).columns(fields or [], f"'{source.path}'")
    if not kept:
        raise DataError(f"no file has records of --format {form}: give JSON lines, JSON or Parquet")
    if not left_out:
        return kept, []
    return kept, [
        f"{len(left_out)} files in folders hold no conversations of the format {form}: left out, "
        f"the first is '{left_out[0].path}'"
    ]
