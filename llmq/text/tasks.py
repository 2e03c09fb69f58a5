"""Tasks of `llmq eval`: published files of multiple-choice questions, and plain texts. Prompts are
the zero-shot prompts of lm-eval's tasks with the same names."""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmq.base.errors import ConfigError, DataError, warn
from llmq.base.files import check_readable
from llmq.base.records import (
    HALVES,
    TABLES,
    json_layout,
    json_record,
    layout_of_name,
    read_json,
    read_rows,
    whole_characters,
)
from llmq.text.inputs import read_text

Record = Mapping[str, Any]


class Answer(NamedTuple):
    """Answer of a question: the continuation is scored given the context. length: number of
    characters of the answer; acc_norm divides log-likelihoods by this length."""

    context: str
    continuation: str
    length: int


class Question(NamedTuple):
    """Question with a choice of answers. gold: index of the right answer. where: place in the file,
    for messages."""

    choices: tuple[Answer, ...]
    gold: int
    where: str


class Pair(NamedTuple):
    """Record in JSON with two answers, the right one first. where: place in the file, for
    messages."""

    record: bytes
    where: str

    @property
    def choices(self) -> tuple[Answer, Answer]:
        """Two empty answers: the texts of both answers are only in the record."""
        return (Answer("", "", 1),) * 2

    @property
    def gold(self) -> int:
        return 0


class Text(NamedTuple):
    """Document all of whose tokens are scored. where: place in the file, for messages."""

    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Task:
    """Items of a file, in order. kind: a key of KINDS, TEXT or PAIRS. name: name in reports, unique
    among the tasks of a command."""

    name: str
    kind: str
    path: Path
    items: tuple[Question, ...] | tuple[Pair, ...] | tuple[Text, ...]

    @property
    def is_text(self) -> bool:
        """True for texts, False for questions."""
        return self.kind == TEXT

    @property
    def metrics(self) -> tuple[str, ...]:
        if self.is_text:
            return TEXT_METRICS
        if self.kind == PAIRS:
            return ("acc",)
        return ("acc", "acc_norm") if KINDS[self.kind].normalized else ("acc",)


# ------------------------------------------------------------------------------------------------
# Kinds of questions


def _field(record: Record, name: str, kind: type | tuple[type, ...] = str) -> Any:
    value = record.get(name)
    if not isinstance(value, kind):
        shown = "is missing" if value is None else f"is a {type(value).__name__}"
        raise DataError(f"field '{name}' {shown}")
    return value


def _answers(prompt: str, choices: list[str]) -> tuple[Answer, ...]:
    """Answers behind one prompt. choices: the answers' texts."""
    return tuple(Answer(prompt, f" {text}", len(text)) for text in choices)


def _index(record: Record, name: str, count: int, first: int = 0) -> int:
    """Index among `count` choices of the label in field `name` of a record. first: label of the
    first choice. DataError for a label of no choice."""
    value = record.get(name)
    try:
        index = int(value) - first
    except (TypeError, ValueError, OverflowError):  # int() of infinity
        index = -1
    if not 0 <= index < count:
        raise DataError(
            f"field '{name}' is {value!r}, no answer among {count}: test files are published "
            "without answers, take the validation file"
        )
    return index


def _clean(text: str) -> str:
    """Text without the titles and tags in brackets that HellaSwag took over from WikiHow."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _hellaswag(record: Record) -> tuple[tuple[Answer, ...], int]:
    context = f"{_field(record, 'ctx_a')} {_field(record, 'ctx_b').capitalize()}"
    prompt = _clean(f"{_field(record, 'activity_label')}: {context}")
    endings = [_clean(text) for text in _texts(record, "endings")]
    return _answers(prompt, endings), _index(record, "label", len(endings))


def _texts(record: Record, name: str) -> list[str]:
    texts = _field(record, name, list)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"field '{name}' is no list of texts")
    return texts


def _labelled(record: Record) -> tuple[list[str], list[str]]:
    """Texts and labels of choices: two lists at Hugging Face, a list of pairs at AI2."""
    choices = _field(record, "choices", (dict, list))
    if isinstance(choices, dict):
        texts, labels = _texts(choices, "text"), _texts(choices, "label")
        if len(texts) != len(labels):
            raise DataError(f"'choices' has {len(texts)} texts, but {len(labels)} labels")
        return texts, labels
    if not all(isinstance(choice, dict) for choice in choices):
        raise DataError("field 'choices' has neither texts with labels nor pairs of them")
    return [_field(c, "text") for c in choices], [_field(c, "label") for c in choices]


def _science(record: Record, stem: str, form: str) -> tuple[tuple[Answer, ...], int]:
    """Answers and gold index of ARC and OpenBookQA. stem: the question's field at Hugging Face; AI2
    names this field "stem"."""
    answer = _field(record, "answerKey").lstrip()
    if isinstance(record.get("question"), dict):
        record, stem = record["question"], "stem"
    texts, labels = _labelled(record)
    if answer not in labels:
        raise DataError(f"field 'answerKey' is {answer!r}, not among {', '.join(labels)}")
    return _answers(form.format(_field(record, stem)), texts), labels.index(answer)


def _piqa(record: Record) -> tuple[tuple[Answer, ...], int]:
    prompt = f"Question: {_field(record, 'goal')}\nAnswer:"
    solutions = [_field(record, "sol1"), _field(record, "sol2")]
    return _answers(prompt, solutions), _index(record, "label", 2)


def _winogrande(record: Record) -> tuple[tuple[Answer, ...], int]:
    """Answers and gold index of Winogrande: the text behind the blank is scored given each filled
    blank."""
    before, blank, after = _field(record, "sentence").partition("_")
    if not blank:
        raise DataError("field 'sentence' has no blank '_'")
    filled = [before + _field(record, name) for name in ("option1", "option2")]
    choices = tuple(Answer(context, f" {after.strip()}", len(context)) for context in filled)
    return choices, _index(record, "answer", 2, first=1)


def _boolq(record: Record) -> tuple[tuple[Answer, ...], int]:
    name = "label" if "label" in record else "answer"  # names in SuperGLUE and in BoolQ
    prompt = f"{_field(record, 'passage')}\nQuestion: {_field(record, 'question')}?\nAnswer:"
    return _answers(prompt, ["no", "yes"]), _index(record, name, 2)


def _classes(record: Record) -> tuple[tuple[Answer, ...], int]:
    """One answer without a continuation, and the label: the score head scores the choices."""
    text, label = _field(record, "text"), _field(record, "label", int)
    return (Answer(text, "", 1),), int(label)


def _mmlu(record: Record) -> tuple[tuple[Answer, ...], int]:
    choices = _texts(record, "choices")
    if len(choices) != 4:
        raise DataError(f"field 'choices' has {len(choices)} texts, not four")
    letters = ["A", "B", "C", "D"]
    lines = [f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True)]
    prompt = "\n".join([_field(record, "question").strip(), *lines, "Answer:"])
    if record.get("subject"):
        subject = _field(record, "subject").replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {subject}."
        prompt = f"{head}\n\n{prompt}"
    if record.get("answer") in letters:
        return _answers(prompt, letters), letters.index(record["answer"])
    return _answers(prompt, letters), _index(record, "answer", 4)


class Kind(NamedTuple):
    """Published format of records. fields: names that identify the format. read: returns a
    record's answers and the right one's index. source: a sentence on where to get a file.
    normalized: True if acc_norm is a metric."""

    fields: set[str]
    read: Callable[[Record], tuple[tuple[Answer, ...], int]]
    source: str
    normalized: bool = False


def _hub(kind: str, repository: str) -> str:
    return (
        f"take the Parquet file with answers from the data set {repository} of the hub, and give "
        f"it as --task {kind}=FILE"
    )


_arc = partial(_science, stem="question", form="Question: {}\nAnswer:")
_openbookqa = partial(_science, stem="question_stem", form="{}")
KINDS = {
    "hellaswag": Kind(
        {"ctx_a", "ctx_b", "endings", "activity_label"},
        _hellaswag,
        "`llmq data hellaswag` fetches data/hellaswag.jsonl",
        normalized=True,
    ),
    "openbookqa": Kind(
        {"question_stem", "choices", "answerKey"},
        _openbookqa,
        _hub("openbookqa", "allenai/openbookqa"),
        normalized=True,
    ),
    "arc": Kind(
        {"question", "choices", "answerKey"}, _arc, _hub("arc", "allenai/ai2_arc"), normalized=True
    ),
    "piqa": Kind({"goal", "sol1", "sol2"}, _piqa, _hub("piqa", "ybisk/piqa"), normalized=True),
    "winogrande": Kind(
        {"sentence", "option1", "option2"}, _winogrande, _hub("winogrande", "allenai/winogrande")
    ),
    "boolq": Kind({"passage", "question"}, _boolq, _hub("boolq", "google/boolq")),
    "mmlu": Kind({"question", "choices", "answer"}, _mmlu, _hub("mmlu", "cais/mmlu")),
    "classes": Kind(
        {"text", "label"}, _classes, "it is of records with text and label, --task classes=FILE"
    ),
}
TEXT, CLASSES, PAIRS = "text", "classes", "pairs"
_OTHERS = (TEXT, PAIRS)  # kinds without questions
TEXT_METRICS = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
_SPELLINGS = {"arc_easy": "arc", "arc_challenge": "arc"}  # lm-eval's names of kinds


def _recognised(record: Record, where: str) -> str:
    """Kind of a record by its fields. DataError for fields of no kind or several kinds."""
    fields = set(record)
    if {"question", "answerKey"} <= fields and isinstance(record["question"], dict):
        raise DataError(
            f"{where}: a file of ARC looks like one of OpenBookQA here: say which it is, as in "
            "--task arc=FILE"
        )
    kinds = [kind for kind, s in KINDS.items() if s.fields <= fields and kind != CLASSES]
    if not kinds and {"chosen", "rejected"} <= fields:
        return PAIRS
    if not kinds and "text" in fields:
        return TEXT
    if len(kinds) != 1:
        raise DataError(
            f"{where}: fields {', '.join(sorted(fields))} are those of no task: say which it is, "
            f"as in --task KIND=FILE, with one of {', '.join([*KINDS, *_OTHERS])}"
        )
    return kinds[0]


# ------------------------------------------------------------------------------------------------
# Files


def parse_spec(spec: str) -> tuple[str | None, Path]:
    """Kind and file of `[KIND=]FILE`; the kind is None if the spec has none. ConfigError for an
    unknown kind."""
    kind, equals, name = spec.partition("=")
    kind = _SPELLINGS.get(kind, kind)
    if equals and (kind in KINDS or kind in _OTHERS) and name:
        return kind, Path(os.path.expanduser(name))
    if equals and not Path(spec).exists():
        kinds = ", ".join([*KINDS, *_OTHERS])
        raise ConfigError(f"a task is FILE or KIND=FILE with one of {kinds}, got {spec!r}")
    return None, Path(os.path.expanduser(spec))  # pathlib's expanduser raises for an unknown user


def read_tasks(specs: list[str] | tuple[str, ...], limit: int | None = None) -> list[Task]:
    """Tasks of specs `[KIND=]FILE`. A task's name is its kind, or its file if several tasks have
    the kind. limit: number of first items to take of each task; None: all. DataError for an
    unreadable, empty or unknown file; ConfigError for an unknown kind."""
    tasks = [_read_task(*parse_spec(spec), limit) for spec in specs]
    kinds = [task.kind for task in tasks]
    named = [t if kinds.count(t.kind) == 1 else replace(t, name=t.path.stem) for t in tasks]
    names = [task.name for task in named]
    for task in named:
        if names.count(task.name) > 1:
            raise DataError(f"two tasks are called '{task.name}': rename one of their files")
    return named


def _read_task(kind: str | None, path: Path, limit: int | None) -> Task:
    if not path.is_file():
        named = KINDS.get(_SPELLINGS.get(path.name, path.name))
        if named is not None:
            raise DataError(f"task '{path}' is a kind, and no file: {named.source}")
        raise DataError(f"task file '{path}' is not there")
    items: list[Question] | list[Pair] | list[Text] = []
    try:
        for record, where in read_records(path):
            kind = kind or _recognised(record, where)
            items.append(_item(kind, record, where))
            if len(items) == limit:
                break
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    items = [item for item in items if not isinstance(item, Text) or item.text]
    if not items:
        raise DataError(f"task file '{path}' has no records")
    return Task(kind, kind, path, tuple(items))


def read_records(path: Path) -> Iterator[tuple[Record, str]]:
    """Records of JSON lines, a JSON array or a table, each with its place in the file for messages;
    any other file is one text. DataError for a damaged file."""
    check_readable(path)
    by_name = layout_of_name(path.name)
    if by_name in TABLES:
        yield from read_rows(str(path))
        return
    if by_name is None:
        pieces = read_text(str(path), path.stat().st_size)
        yield {"text": "".join(piece.text for piece in pieces)}, str(path)
        return
    layout = json_layout(str(path))
    if layout is None:
        raise DataError(f"'{path}' holds neither an object on each line nor an array of objects")
    for item in read_json(str(path), layout, 0, 0):
        record = json_record(item.text, item.where)
        text = json.dumps(record, ensure_ascii=False)
        whole = whole_characters(text, item.text)
        if whole != text:
            warn(f"{item.where} has {HALVES}")
            record = json.loads(whole)
        yield record, item.where


def _item(kind: str, record: Record, where: str) -> Question | Pair | Text:
    if kind == PAIRS:
        return Pair(json.dumps(record).encode(), where)
    try:
        if kind == TEXT:
            return Text(_field(record, "text"), where)
        return Question(*KINDS[kind].read(record), where)
    except DataError as error:
        raise DataError(f"{where}: not as {kind} has it: {error}") from None
