"""The format of records: texts from one field, texts from a template over several fields, or
conversations of one shape. --format names the format; without a name the first record of each JSON
file and the columns of each table decide, before anything is written."""

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from typing import Any, ClassVar

from llmq.base.errors import ConfigError, DataError
from llmq.base.records import TABLES, column_names, json_record, read_json
from llmq.text.conversations import (
    CLASSES,
    FLAGS,
    FORMATS,
    LABELS,
    OPTIONAL,
    PAIRS,
    PLAIN,
    REQUIRED,
    TEXT,
    RecordConversation,
)
from llmq.text.inputs import InputSource

DEFAULT_FIELD = "text"
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}  # a shell passes these on unchanged


@dataclass(frozen=True)
class RecordText:
    """Reader of texts in records. field: the field whose value is the text. template: text with
    {names} of fields, used instead of `field`; \\n, \\t, \\r and \\\\ are escapes as in Python, {{
    and }} are braces."""

    form: ClassVar[str] = TEXT
    in_pairs: ClassVar[bool] = False
    field: str = DEFAULT_FIELD
    template: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a malformed template."""
        _ = self.names

    @cached_property
    def _parts(self) -> list[tuple[str, str | None]]:
        """Pairs of a literal text and the field behind this text; the field is None at the
        template's end."""
        unescaped = re.sub(r"\\[ntr\\]", lambda match: _ESCAPES[match[0]], self.template)
        try:
            parsed = list(Formatter().parse(unescaped))
        except ValueError as error:
            raise ConfigError(f"--template: {error}; braces are written {{{{ and }}}}") from None
        for _, name, form, conversion in parsed:
            if name is not None and (form or conversion or not name):
                raise ConfigError("--template: braces hold the name of a field and nothing else")
        if not any(name for _, name, _, _ in parsed):
            raise ConfigError(
                f"--template: {self.template!r} names no field, as '{{title}}\\n{{text}}' does"
            )
        return [(literal, name) for literal, name, _, _ in parsed]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Fields that a record must have."""
        if self.template is None:
            return (self.field,)
        return tuple(dict.fromkeys(name for _, name in self._parts if name is not None))

    @property
    def is_default(self) -> bool:
        """True if neither a field nor a template was given."""
        return self == RecordText()

    @property
    def flag(self) -> str:
        """The option that names the fields, for messages."""
        return f"--field {self.field}" if self.template is None else "--template"

    def missing(self, fields: Iterable[str]) -> str | None:
        """The first of `names` that is not in `fields`; None if all are."""
        fields = set(fields)
        return next((name for name in self.names if name not in fields), None)

    def columns(self, there: Sequence[str], where: str) -> Sequence[str]:
        """The fields to read, `names`; DataError, which begins with `where`, for a name that is not
        in `there`, the fields of the file."""
        if self.missing(there) is not None:
            more = ["or, for conversations, --format"] if self.is_default else []
            raise self.lacks(where, there, *more)
        return self.names

    def lacks(self, where: str, fields: Sequence[str], *more: str) -> DataError:
        """The error for a record or a file whose `fields` lack a needed field. more: further
        remedies to name."""
        name, known = self.missing(fields), ", ".join(map(str, fields)) or "none"
        mend = f"use --field with one of {known}"
        if self.template is not None:
            mend = f"--template asks for it, and there is {known}"
        return DataError(f"{where}: no field '{name}': {', '.join([mend, *more])}")

    def of(self, record: Mapping[str, Any], where: str) -> str:
        """Text of a record; "" if the field, or every field of the template, is null or empty.
        DataError, which begins with `where`, for a missing field or a value that is no text."""
        self.columns([*record], where)
        if self.template is None:
            return _text(record[self.field], self.field, where)
        values = {name: _text(record[name], name, where, numbers=True) for name in self.names}
        if not any(values.values()):
            return ""
        return "".join(
            literal + ("" if name is None else values[name]) for literal, name in self._parts
        )

    def of_json(self, line: str | bytes, where: str) -> str:
        """Text of a JSON record in bytes, perhaps with half characters; a str is returned as it is.
        DataError for bytes that are no record."""
        return line if isinstance(line, str) else self.of(json_record(line, where), where)


def _text(value: Any, field: str, where: str, *, numbers: bool = False) -> str:
    """Value as text, "" for null. numbers: True to write numbers and booleans as in JSON, False to
    refuse numbers and booleans."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if numbers and isinstance(value, int | float):
        return json.dumps(value)
    raise DataError(
        f"{where}: field '{field}' is a {type(value).__name__}, not a text: choose another one "
        "with --field"
        if not numbers
        else f"{where}: field '{field}' is a {type(value).__name__}, which --template cannot write"
    )


def one_field(fields: Sequence[str] | None, template: str | None) -> str:
    """Field of --field, else DEFAULT_FIELD. ConfigError for several fields, or for a field and a
    template."""
    if fields and len(fields) > 1:
        names = "".join(f"{{{name}}}" for name in fields)
        raise ConfigError(
            f"--field: given {len(fields)} times; the text is one field, or --template '{names}'"
        )
    if fields and template is not None:
        raise ConfigError("--field: excludes --template, give one of them")
    return fields[0] if fields else DEFAULT_FIELD


def choose_format(
    sources: Sequence[InputSource], form: str, text: RecordText
) -> tuple[RecordText | RecordConversation, list[InputSource], list[str]]:
    """Reader of all records, files to read, and warnings. form: one of FORMATS, else ConfigError.
    text: the reader to use for texts. DataError if files contradict each other or the format."""
    if form not in FORMATS:
        raise ConfigError(f"--format is {form}: give {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if is_auto := form == "auto":
        form = TEXT if not text.is_default else _recognised(sources, text)
    if form == TEXT:
        kept, warnings = having_fields(sources, text)
        return text, kept, warnings + (_unread(kept, form, False) if text.is_default else [])
    kept, warnings = _having(sources, form)
    warnings += _unread(kept, form, is_auto)
    if not text.is_default:
        warnings.append(f"{text.flag} has no effect: the inputs are conversations")
    return RecordConversation(form), kept, warnings


_DECIDING = ("label", "chosen", "rejected")  # fields of answers that may be bad to train on
_OF_RECORDS = (*FLAGS, "score")  # fields of messages or tokens, which no format reads in records


def _unread(sources: Sequence[InputSource], form: str, is_auto: bool) -> list[str]:
    """Warnings of fields that the format `form` does not read. is_auto: True if --format names no
    format; then a field of _DECIDING raises DataError."""
    fields = {other: (*REQUIRED[other], *OPTIONAL[other]) for other in REQUIRED}
    unread = {*_DECIDING, *_OF_RECORDS}
    if form != TEXT:
        unread = unread.union(*fields.values()) - {TEXT, *fields[form]}
    sources_by_field: dict[str, InputSource] = {}
    for source in sources:
        for name in field_names(source) or []:
            if name in unread:
                sources_by_field.setdefault(name, source)
    warnings = []
    for name, source in sources_by_field.items():
        readers = [other for other, names in fields.items() if name in names]
        no = f"which --format {form} does not read: {' or '.join(readers)} does"
        no = no if readers else "which no format reads"
        warning = f"'{source.path}' has the field '{name}', {no}"
        if is_auto and name in _DECIDING:
            raise DataError(f"{warning}; choose one with --format")
        warnings.append(warning)
    return warnings


def _recognised(sources: Sequence[InputSource], text: RecordText) -> str:
    sources_by_form: dict[str, InputSource] = {}
    for source in sources:
        fields = field_names(source) or []
        forms = [TEXT] * (text.field in fields)
        forms += [
            n
            for n, needs in REQUIRED.items()
            if n not in (LABELS, CLASSES) and {*needs} <= {*fields}
        ]
        if PAIRS in forms:  # the prompt of a pair may be a field of another format
            forms = [PAIRS]
        if len(forms) > 1:
            raise DataError(
                f"'{source.path}' has fields of several formats ({', '.join(forms)}): choose one "
                "with --format"
            )
        for form in forms:
            sources_by_form.setdefault(form, source)
    if len(sources_by_form) > 1:
        (one, first), (other, second), *_ = sources_by_form.items()
        raise DataError(
            f"'{first.path}' is of the format {one} and '{second.path}' of {other}: tokenize them "
            "one by one, or choose one with --format"
        )
    return next(iter(sources_by_form), TEXT)


def _having(sources: Sequence[InputSource], form: str) -> tuple[list[InputSource], list[str]]:
    """Files of the format `form`, and warnings. Files of other formats are left out if they are in
    a given folder, and raise DataError if they were named themselves."""
    kept, left_out = [], []
    for source in sources:
        fields = field_names(source)
        fits = source.kind != "text" and (fields is None or {*REQUIRED[form]} <= {*fields})
        if not fits and not source.in_folder:
            if source.kind == "text":
                raise DataError(
                    f"'{source.path}' is a text: conversations are read of JSON lines, JSON and "
                    "tables"
                )
            RecordConversation(form).columns(fields or [], f"'{source.path}'")
        (kept if fits else left_out).append(source)
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
    """Files that have the fields of `text`, and warnings. Files in folders that lack a field are
    left out; a JSON file's first record decides. DataError for a missing field if only texts are
    left."""
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
    warning = f"{len(lacking)} files in folders have no field '{text.missing(names)}': left out"
    return kept, [f"{warning}, the first is '{first.path}'"]


def field_names(source: InputSource) -> list[str] | None:
    """Fields of a table, a data set, or a JSON file's first record; None for texts and unreadable
    files."""
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
    ):  # reported when the records are read
        return None
    return list(record) if isinstance(record, dict) else None


# ------------------------------------------------------------------------------------------------
# Records for a score head


def score_form(record: Mapping[str, Any], labels: int) -> str:
    """Format, for `encode_records`, of records that a score head of `labels` labels shall score:
    the format in which `tokenize` reads such records for training. DataError for a record with the
    fields of no format."""
    if labels > 1:
        return CLASSES
    forms = (PAIRS, PLAIN, "messages", "conversations", "instruction")
    form = next((f for f in forms if all(record.get(name) for name in REQUIRED[f])), None)
    if form is None and record.get(DEFAULT_FIELD) is None:
        raise DataError(
            f"the fields {', '.join(record)} are of no text and of no conversation: see "
            "`llmq tokenize` for the formats"
        )
    return form or TEXT


def scored_line(record: Mapping[str, Any], where: str, labels: int) -> tuple[bytes, str]:
    """Record in JSON, and its place `where`. With several labels the record gets a class, which its
    format demands and nobody reads."""
    label = {"label": 0} if labels > 1 else {}
    return json.dumps({**record, **label}).encode(), where


def prompt_of(record: Mapping[str, Any], form: str) -> str:
    """The conversation of a record without the last answer, as JSON text to compare prompts by."""
    (conversation,) = RecordConversation(form).of_json(json.dumps(record).encode(), "")
    count = conversation.first_trained or len(conversation.messages) - 1
    return json.dumps([conversation.messages[:count], conversation.tools])
