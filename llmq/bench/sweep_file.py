"""The rows of a sweep: what a file of `llmq bench` and the command line stand for."""

from __future__ import annotations

import ast
import difflib
import itertools
import json
import keyword
import math
import re
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from simpleeval import DEFAULT_OPERATORS, EvalWithCompoundTypes, InvalidExpression

from llmq.base.errors import ConfigError
from llmq.options.option_file import read_option_file
from llmq.options.option_types import AUTO, parse_size
from llmq.options.options import OPTIONS, TrainConfig
from llmq.options.options_io import FIELDS, make_config

Lookup = Callable[[str], Any]
"""The value of an option of this name."""

_TOKEN = re.compile(
    r"(?P<blank>\s+)|(?P<number>\d[\d.]*[eE][+-]\d+|\d[\w.]*)|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<name>[A-Za-z_]\w*(?:-\w+)*)|(?P<sign><=|>=|==|!=|[-+*/%<>()\[\],])|(?P<other>.+)",
    re.DOTALL,
)
_WORDS = {"true": "True", "false": "False", "none": "None"}
_NODES = (ast.Constant, ast.Name, ast.List, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare)


class Condition:
    """A condition on options, such as `batch-size * seq-len <= 32768`, evaluated by simpleeval as a
    Python expression of what docs/sweeps.md names: no calls, attributes, subscripts. A number
    equals no text and no switch: `batch-size == '1'` is an error."""

    def __init__(self, text: str, names: Collection[str]):
        """text: as it is written. names: of all options. ConfigError if it is none."""
        self.text = text
        self._options = {_identifier(name): name for name in names}
        python = "".join(self._translated(token) for token in _TOKEN.finditer(text)).strip()
        try:
            self._tree = ast.parse(python, mode="eval").body
        except (SyntaxError, MemoryError, RecursionError) as error:
            raise self._wrong(getattr(error, "msg", "it is nested too deeply")) from None
        for node in ast.walk(self._tree):
            if not isinstance(node, (*_NODES, *_OPERATORS, ast.And, ast.Or, ast.Load)):
                raise self._wrong(f"a condition has no {type(node).__name__.lower()}")

    def holds(self, lookup: Lookup) -> bool:
        """With these values of options. ConfigError where they do not go together."""

        def value(node: ast.Name) -> Any:
            found = lookup(self._options[node.id])
            return list(found) if isinstance(found, tuple) else found

        evaluator = EvalWithCompoundTypes(operators=_OPERATORS, functions={}, names=value)
        evaluator.nodes = {kind: evaluator.nodes[kind] for kind in _NODES}
        evaluator.nodes[ast.BoolOp] = lambda node: (any if isinstance(node.op, ast.Or) else all)(
            _truth(evaluator._eval(part)) for part in node.values
        )
        try:
            return _truth(evaluator.eval(self.text, self._tree))
        except (ConfigError, InvalidExpression, TypeError, ArithmeticError) as error:
            raise self._wrong(str(error)) from None
        except RecursionError:
            raise self._wrong("it is nested too deeply") from None

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError(f"where: {self.text}: {why}")

    def _translated(self, token: re.Match[str]) -> str:
        """A token in Python."""
        kind, word = str(token.lastgroup), token[0]
        if kind == "other":
            raise self._wrong(f"cannot read {word[:20]!r}")
        if kind == "number":
            return repr(self._number(word))
        if kind == "name" and word not in ("and", "or", "not", "in"):
            return _WORDS.get(word.lower()) or self._option(word)
        # Two texts side by side are no longer one text, as they would be in Python.
        return {"blank": " ", "text": f"({word[1:-1]!r})"}.get(kind, word)

    def _number(self, word: str) -> int | float:
        for parse in (int, float, parse_size):
            try:
                if math.isfinite(number := parse(word)):
                    return number
            except ValueError:
                continue
        raise self._wrong(f"{word} is no number")

    def _option(self, word: str) -> str:
        if (found := _identifier(word)) in self._options:
            return found
        near = difflib.get_close_matches(word.replace("_", "-"), self._options.values(), n=1)
        hint = f"did you mean {near[0]}?" if near else "text stands in quotes"
        raise self._wrong(f"unknown option {word}, {hint}")


def _identifier(option: str) -> str:
    """The name of an option in Python, where `continue` may be none."""
    name = option.replace("-", "_")
    return f"{name}_" if keyword.iskeyword(name) else name


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{value!r} is neither true nor false")
    return value


def _equal(left: Any, right: Any) -> bool:
    """ConfigError for values of two kinds. `none` is equal to itself, and differs from others."""
    kinds = [_KINDS.get(type(value), "other") for value in (left, right) if value is not None]
    if len({*kinds}) > 1:
        raise ConfigError(f"{left!r} never equals {right!r}: {kinds[0]} and {kinds[1]}")
    return left == right


def _contained(item: Any, items: Any) -> bool:
    if not isinstance(items, list):
        raise ConfigError(f"in needs a list, got {items!r}")
    return True in [_equal(item, other) for other in items]


_KINDS = {int: "number", float: "number", str: "text", bool: "switch", list: "list"}
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub)
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    **{kind: DEFAULT_OPERATORS[kind] for kind in (*_ARITHMETIC, *_ORDER)},
    ast.Eq: _equal,
    ast.NotEq: lambda left, right: not _equal(left, right),
    ast.In: _contained,
    ast.NotIn: lambda item, items: not _contained(item, items),
    ast.Not: lambda value: not _truth(value),
}


MOST_RUNS = 100_000  # that lists may stand for, before conditions: more is a slip

Row = dict[str, Any]
"""The options of one run, by flag name without dashes."""

_FIRST_FLAG = {flag: opt.flags[0] for opt in OPTIONS.values() for flag in opt.flags}
_DATA = "train_file eval_file eval_fraction train_seed eval_seed steps epochs eval_every_n_steps "
_DATA += "eval_num_steps document_separator"
# Options that change nothing here: which data there is, what is written when, what is timed beside.
_WITHOUT_EFFECT = {
    opt.flags[0]
    for name, opt in OPTIONS.items()
    if opt.group in {OPTIONS[n].group for n in ("log_file", "eval_task", "guard")}
    or name in (*_DATA.split(), "measure_scaling")
}


class _Part(NamedTuple):
    """The content of a file or one of its runs: options, lists that go together, conditions."""

    options: dict[str, Any]
    zips: list[dict[str, list[Any]]]
    where: list[Condition]

    def without(self, keys: set[str]) -> _Part:
        """Without what somebody who wins has given."""
        options = {key: value for key, value in self.options.items() if key not in keys}
        zips = [{k: v for k, v in one.items() if k not in keys} for one in self.zips]
        return self._replace(options=options, zips=[one for one in zips if one])

    @property
    def keys(self) -> set[str]:
        """The names of its options, those that go together too."""
        return {*self.options, *itertools.chain.from_iterable(self.zips)}


def read_runs(given: Mapping[str, Any], file: Path | None, *, trains: bool = False) -> list[Row]:
    """The options of every run, each once. given: from the command line; wins. trains: on data, for
    losses; else on random tokens, where options of data are refused. file: YAML, TOML or JSON with
    options of all runs, and under `runs` a list of those of each. A list as a value stands for one
    run with each of its elements; under `zip` lists go together; `where` says which runs are made.
    ConfigError."""
    shared = {} if file is None else read_option_file(file)
    runs = shared.pop("runs", [{}])
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise ConfigError(f"--config: {file}: runs must be a list of mappings of options")
    of_all = _part(shared, file)
    expanded, excluded = [], 0
    for run in runs:
        own = _part(run, file).without(set(given))
        inherited = of_all.without(set(given) | own.keys)
        for row in _product(inherited, own, given):
            if all(c.holds(partial(value_of, row)) for c in (*of_all.where, *own.where)):
                expanded.append(row)
            else:
                excluded += 1
    if not expanded:
        why = f"none of the {excluded} runs meets `where`" if excluded else "it has an empty list"
        raise ConfigError(f"--config: {file}: {why}, so there is nothing to run")
    for options in expanded:
        _check(options, several=len(expanded) > 1, trains=trains)
    unique: dict[Hashable, Row] = {}
    for options in expanded:
        unique.setdefault(identity(options), options)
    return list(unique.values())


def one_run(given: Mapping[str, Any], file: Path | None) -> TrainConfig:
    """The only run of these options, as for read_runs. ConfigError if there are several."""
    runs = read_runs(given, file)
    if len(runs) > 1:
        raise ConfigError(f"--save-config: holds the options of one run, but these are {len(runs)}")
    return make_config(runs[0])


def identity(options: Row) -> Hashable:
    """A text that is equal for runs that do the same, however they are spelled."""
    return _identity(json.dumps(options, sort_keys=True, default=str))


@cache
def _identity(text: str) -> Hashable:
    """The identity of options in JSON. A long sweep asks for each of them again after each run."""
    try:  # the log's name is made from the time, and when a run counts as hung does not change it
        return replace(make_config(json.loads(text)), log_file=None, watchdog=0)
    except ConfigError:  # of a report by another version, which had other options
        return text


def _part(content: Mapping[str, Any], file: Path | None) -> _Part:
    """A part made of a mapping in a file."""
    plain = {key: value for key, value in content.items() if key not in ("zip", "where")}
    where = content.get("where", [])
    texts = where if isinstance(where, list) else [where]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"--config: {file}: where must be a condition or a list of conditions")
    zips = content.get("zip", [])
    zips = [_together(one, file) for one in (zips if isinstance(zips, list) else [zips])]
    part = _Part(_by_flag(plain), zips, [Condition(text, FIELDS) for text in texts])
    count = len(part.options) + sum(map(len, zips))
    if count > len(part.keys):
        names = [*part.options, *itertools.chain.from_iterable(zips)]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--config: {file}: {twice} is given twice, once of it under zip")
    return part


def _together(lists: Any, file: Path | None) -> dict[str, list[Any]]:
    """One mapping under `zip`."""
    if not isinstance(lists, dict) or not all(isinstance(v, list) for v in lists.values()):
        raise ConfigError(f"--config: {file}: zip must be a mapping of options to lists")
    sizes = {key: len(values) for key, values in lists.items()}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{key} has {size}" for key, size in sizes.items())
        raise ConfigError(f"--config: {file}: lists under zip must be equally long: {told}")
    return _by_flag(lists)


def _product(inherited: _Part, own: _Part, given: Mapping[str, Any]) -> list[Row]:
    """Every combination of what the lists have."""
    plain = {"from-scratch": True} | inherited.options | own.options | given
    choices: list[list[Row]] = [
        [{key: value} for value in (values if isinstance(values, list) else [values])]
        for key, values in plain.items()
    ]
    for lists in (*inherited.zips, *own.zips):
        columns = zip(*lists.values(), strict=True)
        choices.append([dict(zip(lists, values, strict=True)) for values in columns])
    if (count := math.prod(map(len, choices))) > MOST_RUNS:
        raise ConfigError(f"--config: its lists stand for {count} runs, more than {MOST_RUNS}")
    return [
        {key: value for one in chosen for key, value in one.items()}
        for chosen in itertools.product(*choices)
    ]


def value_of(options: Row, name: str) -> Any:
    """The value of an option in a run; what is not given has its default."""
    name = _FIRST_FLAG[name]
    given, field = options.get(name), FIELDS[name]
    found = getattr(_defaults(), field) if given is None else OPTIONS[field].convert(given)
    return str(found) if isinstance(found, Path) else found


@cache
def _defaults() -> TrainConfig:
    return TrainConfig()


def _check(options: Row, *, several: bool, trains: bool) -> None:
    """ConfigError for a run that cannot be made, before any is."""
    for key in () if trains else options:
        if key in _WITHOUT_EFFECT:
            raise ConfigError(f"--{key}: has no effect on a benchmark, leave it out")
    if options.get("from-scratch"):
        _check_random(options)
    try:
        config = make_config(options)
    except ConfigError as error:
        if not several:
            raise
        raise ConfigError(f"{error} (run {_spelled(options)})") from None
    if config.vocab_size == AUTO and not trains:
        raise ConfigError("--vocab-size: auto needs token files, and tokens are random here")


def _check_random(options: Row) -> None:
    """ConfigError for adapters that need a model which was trained."""
    why = "a benchmark has random weights"
    if options.get("adapter") is not None:
        raise ConfigError(
            f"--adapter: {why}: give the rank of the adapters as --lora-rank, and their matrices "
            "as --lora-targets"
        )
    if options.get("lora-init") == "pissa":
        raise ConfigError(
            f"--lora-init: {why}, of which pissa has nothing to split: leave it out, a step is the "
            "same without it"
        )


def _spelled(options: Row) -> str:
    return " ".join(flag_of(key, value) for key, value in options.items() if key != "from-scratch")


def flag_of(key: str, value: Any) -> str:
    """An option as on the command line."""
    if isinstance(value, bool):
        return f"--{key}" if value else f"--no-{key}"
    return f"--{key}={value}"


def _by_flag(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options under each one's first flag; unknown ones are left to make_config."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        flag = str(key).replace("_", "-")
        flag = _FIRST_FLAG.get(flag, flag)
        if flag in found:
            raise ConfigError(f"--config: {flag} is given twice, under two names")
        found[flag] = value
    return found
