"""The text of a record: one of its fields, or a template over several."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from typing import Any

from llmq.base.errors import ConfigError, DataError

DEFAULT_FIELD = "text"
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}  # a shell passes them on


@dataclass(frozen=True)
class RecordText:
    """Reads texts out of records.

    field: its value is the text. template: a text with {names} of fields, instead of one field;
    \\n, \\t, \\r and \\\\ mean what they do in Python, {{ and }} are braces.
    """

    field: str = DEFAULT_FIELD
    template: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a malformed template."""
        _ = self.names

    @cached_property
    def _parts(self) -> list[tuple[str, str | None]]:
        """Pairs of the text before each field of the template, and the field; None at its end."""
        unescaped = re.sub(r"\\[ntr\\]", lambda found: _ESCAPES[found[0]], self.template)
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
        """The fields that a record must have."""
        if self.template is None:
            return (self.field,)
        return tuple(dict.fromkeys(name for _, name in self._parts if name is not None))

    @property
    def is_default(self) -> bool:
        """Whether neither a field nor a template was given."""
        return self == RecordText()

    @property
    def flag(self) -> str:
        """The option that asks for these fields."""
        return f"--field {self.field}" if self.template is None else "--template"

    def missing(self, there: Iterable[str]) -> str | None:
        """The first of the names that is not there; None if all are."""
        there = set(there)
        return next((name for name in self.names if name not in there), None)

    def columns(self, there: Sequence[str], where: str) -> Sequence[str]:
        """The names; DataError, which begins with `where`, if one of them is not there."""
        if self.missing(there) is not None:
            more = ["or, for conversations, --format"] if self.is_default else []
            raise self.lacks(where, there, *more)
        return self.names

    def lacks(self, where: str, there: Sequence[str], *more: str) -> DataError:
        """The error of a record or a file that has other fields. more: other remedies."""
        name, known = self.missing(there), ", ".join(map(str, there)) or "none"
        mend = f"use --field with one of {known}"
        if self.template is not None:
            mend = f"--template asks for it, and there is {known}"
        return DataError(f"{where}: no field '{name}': {', '.join([mend, *more])}")

    def of(self, record: Mapping[str, Any], where: str) -> str:
        """The text; empty where the field, or every field of the template, is null or empty.

        DataError, which begins with `where`, for a field that is missing or has no text.
        """
        self.columns([*record], where)
        if self.template is None:
            return _text(record[self.field], self.field, where)
        values = {name: _text(record[name], name, where, numbers=True) for name in self.names}
        if not any(values.values()):
            return ""
        return "".join(
            literal + ("" if name is None else values[name]) for literal, name in self._parts
        )

    def of_json(self, line: bytes, where: str) -> str:
        """The text of a record in JSON; DataError if it is none."""
        return whole_characters(self.of(json_record(line, where), where), line)


def json_record(line: bytes, where: str) -> dict[str, Any]:
    """Parse a record. DataError, which begins with `where`, if it is no JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not readable as JSON: {error}; mend or remove it") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(f"{where}: a {kind} instead of a JSON object on each line")
    return record


def whole_characters(text: str, line: bytes) -> str:
    """Replace half characters if the JSON `line`, from which the text comes, may hold some."""
    return mended(text) if b"\\ud" in line.lower() else text


def mended(text: str) -> str:
    """Replace half characters (lone surrogates), which no UTF-8 can hold, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text(value: Any, field: str, where: str, *, numbers: bool = False) -> str:
    """The value as text; a null is empty. numbers: write these and booleans as JSON does."""
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
    """The field of --field, which may be given once. ConfigError for several, or a template."""
    if fields and len(fields) > 1:
        names = "".join(f"{{{name}}}" for name in fields)
        raise ConfigError(
            f"--field: given {len(fields)} times; the text is one field, or --template '{names}'"
        )
    if fields and template is not None:
        raise ConfigError("--field: excludes --template, give one of them")
    return fields[0] if fields else DEFAULT_FIELD
