"""Whether records are texts or conversations, and of which shape: by their fields, or by --format.

All records of a run have the same format. It is decided before anything is written, by the first
record of each JSON file and by the columns of Parquet.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmq.base.errors import DataError
from llmq.data.conversations import REQUIRED, TEXT, check_format, fields_of, formats_of
from llmq.data.documents import Source, field_names, having_field

Chosen = tuple[str, list[Source], list[str]]


def choose_format(sources: Sequence[Source], form: str, field: str) -> Chosen:
    """The format of all records, the files to read, and what to warn of.

    form: of conversations.FORMATS. field: of a text. DataError where files contradict each other
    or the format.
    """
    names = {source: field_names(source) for source in sources}
    if check_format(form) == "auto":
        form = _recognised(names, field)
    if form == TEXT:
        return TEXT, *having_field(sources, field)
    kept, warnings = _having(names, form)
    if field != "text":
        warnings.append(f"--field {field} has no effect: the inputs are conversations")
    return form, kept, warnings


def columns_of(form: str, field: str) -> str | tuple[str, ...]:
    """What is read of Parquet: one field, or several."""
    return field if form == TEXT else fields_of(form)


def _recognised(names: dict[Source, list[str] | None], field: str) -> str:
    found: dict[str, Source] = {}
    for source, fields in names.items():
        forms = formats_of(fields or ())
        if fields and field in fields:
            if field != "text":  # it was asked for
                return TEXT
            forms = [TEXT, *forms]
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


def _having(names: dict[Source, list[str] | None], form: str) -> tuple[list[Source], list[str]]:
    """The files of this format; those of folders that are of no such format are left out."""
    kept, left_out = [], []
    for source, fields in names.items():
        if source.kind != "text" and (fields is None or {*REQUIRED[form]} <= {*fields}):
            kept.append(source)
        elif source.in_folder:
            left_out.append(source)
        else:
            missing = ", ".join(
                f"'{name}'" for name in REQUIRED[form] if name not in (fields or ())
            )
            what = "is a text" if source.kind == "text" else f"has no field {missing}"
            raise DataError(
                f"'{source.path}' {what}: with --format {form} each record needs the fields "
                f"{', '.join(REQUIRED[form])}"
            )
    if not kept:
        raise DataError(f"no file has records of --format {form}: give JSON lines, JSON or Parquet")
    if not left_out:
        return kept, []
    return kept, [
        f"{len(left_out)} files in folders hold no conversations of the format {form}: left out, "
        f"the first is '{left_out[0].path}'"
    ]
