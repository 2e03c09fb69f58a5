"""The data of `llmq finetune`: formats of the input files, token files, and the facts from which a
run's options follow."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.errors import ConfigError, warn
from llmq.base.files import disk_errors, replacing
from llmq.base.records import TABLES, json_record, read_json, read_rows
from llmq.data.document_index import DocumentIndex, trained_tokens
from llmq.data.tokens import TokenFile
from llmq.text.conversations import CLASSES, LABELS, OPTIONAL, PAIRS, REQUIRED, TEXT
from llmq.text.inputs import InputSource, find_files
from llmq.text.record_format import DEFAULT_FIELD, field_names
from llmq.text.tokenize import tokenize

CHAT = tuple(form for form in REQUIRED if form not in (PAIRS, LABELS, CLASSES))
"""Formats of conversations, which `--loss ce` trains."""

COUNTED = 4000  # most records of a file that are counted to choose the held-out fraction
HELD_OUT = 0.1  # fraction of the records that is held out, within the limits below
FEWEST_HELD_OUT, MOST_HELD_OUT = 4, 200

# Common names of fields in other data sets, by llmq's name of the field.
_ALIASES = {
    "prompt": ("question", "query", "input", "problem", "user", "instruction"),
    "completion": ("answer", "response", "output", "solution", "assistant", "reply"),
    "chosen": ("preferred", "better", "accepted"),
    "rejected": ("dispreferred", "worse", "declined"),
    DEFAULT_FIELD: ("content", "body", "document"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneData:
    """The token files of one fine-tuning. files: names of input files by format. folders: folders
    of token files by format. lengths: tokens of each training document, int64 (n,); a pair counts
    the tokens of both answers. trained: number of trained tokens in one pass. held_out: number of
    held-out documents."""

    files: Mapping[str, tuple[str, ...]]
    folders: Mapping[str, Path]
    lengths: np.ndarray
    trained: int
    held_out: int

    @property
    def in_pairs(self) -> bool:
        """Return True if the records are pairs of answers."""
        return PAIRS in self.folders

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def patterns(self, split: str) -> list[str]:
        """Return the paths of the token files of a split, "train" or "eval"."""
        return _token_files(self.folders, split)

    def describe(self) -> str:
        """Return one line about the data for the console."""
        kinds = ", ".join(f"{' '.join(self.files[form])} ({form})" for form in self.files)
        unit = "pairs" if self.in_pairs else "records" if TEXT in self.files else "conversations"
        return (
            f"{self.lengths.size:,} {unit} of {kinds}: {self.tokens:,} tokens, {self.trained:,} "
            f"of them trained; {self.held_out:,} held out"
        )


def parse_map(texts: Sequence[str]) -> dict[str, str]:
    """Parse FIELD=NAME, separated by commas, into {FIELD: NAME}. Raises ConfigError for other
    text."""
    known = {DEFAULT_FIELD, "prompt"}.union(*REQUIRED.values(), *OPTIONAL.values())
    found: dict[str, str] = {}
    for part in (part for text in texts for part in text.split(",")):
        name, _, field = (word.strip() for word in part.partition("="))
        if not field or name not in known:
            raise ConfigError(
                f"--map: expected FIELD=NAME, as prompt=question, with FIELD one of "
                f"{', '.join(sorted(known))}, got {part!r}"
            )
        found[name] = field
    return found


def format_of(source: InputSource, mapping: Mapping[str, str]) -> str:
    """Return the format of a file's records, from the fields of the first record. mapping: see
    parse_map. Raises UnclearFields, with advice, if the fields match no format or several
    formats."""
    names = field_names(source)
    if names is None:
        return TEXT
    renamed = [name for name, field in mapping.items() if field in names]
    there = {*names, *renamed}
    if "label" in there:
        raise ConfigError(
            f"'{source.path}' has the field 'label': train such records with `llmq tokenize "
            "--format labels` and --loss kto, or --format classes and --num-labels"
        )
    if {*REQUIRED[PAIRS]} <= there:
        return PAIRS
    forms = [form for form in CHAT if {*REQUIRED[form]} <= there]
    forms += [TEXT] * (DEFAULT_FIELD in there)
    if renamed:  # fields that the mapping names decide
        chosen = [form for form in forms if {*renamed} & {*REQUIRED.get(form, (TEXT,))}]
        forms = chosen or forms
    if len(forms) == 1:
        return forms[0]
    said = ", ".join(names)
    if not forms:
        raise UnclearFields(f"'{source.path}' has the fields {said}: {_advice(names)}", names)
    raise UnclearFields(
        f"'{source.path}' has the fields {said}, which are of the formats {' and '.join(forms)}: "
        f"name those that count, as --map {_example(forms[0])}",
        names,
    )


class UnclearFields(ConfigError):
    """Raised if the fields of records match no format or several formats. names: names of the
    fields."""

    def __init__(self, headline: str, names: Sequence[str]):
        super().__init__(headline)
        self.names = names


_KINDS = {"answers": "prompt", "pairs": PAIRS, "texts": TEXT}
"""Formats by the answers that the user may give."""


def ask_fields(source: InputSource, unclear: UnclearFields) -> dict[str, str]:
    """Ask at the terminal for the meaning of a file's fields; returns a mapping like parse_map. An
    empty answer takes the default in brackets. Raises ConfigError at the end of input."""
    print(f"'{source.path}' has the fields {', '.join(unclear.names)}.")
    kind = _answer(f"Are these {', '.join(_KINDS)}?", "answers", [*_KINDS])
    needed = REQUIRED.get(_KINDS[kind], (DEFAULT_FIELD,))
    if _KINDS[kind] == PAIRS:
        needed = ("prompt", *needed)
    found = {}
    for name in needed:
        likely = next((a for a in (name, *_ALIASES[name]) if a in unclear.names), unclear.names[0])
        found[name] = _answer(f"Which field is the {name}?", likely, unclear.names)
    said = ",".join(f"{name}={field}" for name, field in found.items())
    print(f"The same without questions: --map {said}")
    return found


def _answer(question: str, likely: str, known: Sequence[str]) -> str:
    while True:
        try:
            said = input(f"{question} [{likely}] ").strip() or likely
        except EOFError:
            raise ConfigError(f"no answer to: {question}") from None
        if said in known:
            return said
        print(f"one of {', '.join(known)}")


def format_or_ask(source: InputSource, mapping: dict[str, str]) -> str:
    """Like format_of, but ask at the terminal about unclear fields, and add the answers to the
    mapping."""
    try:
        return format_of(source, mapping)
    except UnclearFields as unclear:
        if mapping or not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise
        mapping |= ask_fields(source, unclear)
    return format_of(source, mapping)


def _advice(names: Sequence[str]) -> str:
    """Return an example of --map for a file's fields."""
    for form in (PAIRS, "prompt", TEXT):
        needed = REQUIRED.get(form, (DEFAULT_FIELD,))
        found = {n: next((a for a in (n, *_ALIASES[n]) if a in names), None) for n in needed}
        if all(found.values()):
            return "say what they mean, as --map " + ",".join(f"{n}={a}" for n, a in found.items())
    return "say what they mean, as --map prompt=FIELD,completion=FIELD or --map text=FIELD"


def _example(form: str) -> str:
    return ",".join(f"{name}={name}" for name in REQUIRED.get(form, (DEFAULT_FIELD,)))


def prepare(
    inputs: Sequence[str],
    mapping: Mapping[str, str],
    tokenizer: str,
    folder: Path,
    *,
    chat_template: str | None = None,
    overwrite: bool = False,
) -> FinetuneData:
    """Tokenize files into subfolders of `folder`, one for each format; a second call with the same
    arguments does nothing. mapping: result of parse_map; if empty, ask at a terminal about unclear
    fields. overwrite: True to replace token files of other inputs. Raises ConfigError or DataError
    for bad input."""
    sources, mapping = find_files(inputs, exclude=folder), {**mapping}
    by_form: dict[str, list[InputSource]] = {}
    for source in sources:
        by_form.setdefault(format_or_ask(source, mapping), []).append(source)
    if PAIRS in by_form and len(by_form) > 1:
        other = next(form for form in by_form if form != PAIRS)
        raise ConfigError(
            f"'{by_form[PAIRS][0].path}' has pairs of answers and '{by_form[other][0].path}' has "
            "none: train on the one without, and then on the pairs from that model"
        )
    unused = set(mapping.values()).difference(*(field_names(source) or () for source in sources))
    if unused:
        raise ConfigError(f"--map: no file has a field {min(unused)!r}")
    folders = {}
    for form, found in by_form.items():
        paths = [_mapped(source, mapping, folder / "mapped", overwrite) for source in found]
        chat = {} if form == TEXT else {"chat_template": chat_template}
        folders[form] = folder / form
        made = tokenize(
            paths,
            tokenizer=tokenizer,
            out=folders[form],
            eval_fraction=_held_out_part(found),
            format=form,
            overwrite=overwrite,
            **chat,
        )
        warn(*made.warnings)
    names = {form: tuple(Path(source.path).name for source in by_form[form]) for form in by_form}
    return _measured(names, folders)


def _measured(files: Mapping[str, tuple[str, ...]], folders: Mapping[str, Path]) -> FinetuneData:
    lengths, trained, held_out = [np.zeros(0, np.int64)], 0, 0
    for path in _token_files(folders, "train"):
        with closing(TokenFile(path)) as file:
            index = DocumentIndex.read(file)
            lengths.append(np.diff(index.units))
            trained += int(trained_tokens(file, index.offsets).sum())
    for path in _token_files(folders, "eval"):
        with closing(TokenFile(path)) as file:
            held_out += DocumentIndex.read(file).units.size - 1
    sizes = {"lengths": np.concatenate(lengths), "trained": trained, "held_out": held_out}
    return FinetuneData(files=files, folders=folders, **sizes)


def _token_files(folders: Mapping[str, Path], split: str) -> list[str]:
    """Return the paths of the token files of "train" or "eval" in these folders."""
    found = (sorted(folder.glob(f"{split}-*.bin")) for folder in folders.values())
    return [str(path) for paths in found for path in paths]


def _records(source: InputSource) -> Iterator[dict[str, Any]]:
    if source.kind in TABLES:
        yield from (record for record, _ in read_rows(source.path))
        return
    for item in read_json(source.path, source.kind, 0, 0):
        yield json_record(item.text, item.where)


def _held_out_part(sources: Sequence[InputSource]) -> float:
    """Return the fraction of the records to hold out: a tenth, at least 4 and at most 200
    records."""
    count = 0
    for source in sources:
        if source.kind == "text":
            return 0.02  # the last 2 % of the text
        rows = (
            _records(source) if source.kind in TABLES else read_json(source.path, source.kind, 0, 0)
        )
        count += sum(1 for _ in islice(rows, COUNTED))
    held_out = min(max(HELD_OUT * count, FEWEST_HELD_OUT), MOST_HELD_OUT)
    return min(held_out / max(count, 1), 0.5)


def _mapped(source: InputSource, mapping: Mapping[str, str], folder: Path, overwrite: bool) -> str:
    """Return the path of the file, or of a copy with renamed fields."""
    names = field_names(source) or []
    renames = {field: name for name, field in mapping.items() if field in names and field != name}
    if not renames:
        return source.path
    copy = folder / f"{Path(source.path).name.split('.')[0]}.jsonl"
    lines = (
        json.dumps({renames.get(name, name): value for name, value in record.items()})
        for record in _records(source)
    )
    content = "".join(f"{line}\n" for line in lines).encode()
    with disk_errors(copy):
        folder.mkdir(parents=True, exist_ok=True)
        if copy.is_file() and copy.read_bytes() == content:
            return str(copy)
        if copy.exists() and not overwrite:
            raise ConfigError(
                f"--map: '{copy}' has the fields of another command: add --overwrite, or --name"
            )
    with replacing(copy) as file:
        file.write(content)
    return str(copy)
