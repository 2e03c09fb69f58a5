"""Conditions on options, such as `batch-size * seq-len <= 32768`, evaluated by simpleeval.

A condition becomes a Python expression (options lose their hyphens, sizes become bytes) of which
only what docs/sweeps.md names is permitted: no calls, no attributes, no subscripts. A number equals
no text and no switch: `batch-size == '1'` is an error and not a condition that never holds.
"""

from __future__ import annotations

import ast
import difflib
import keyword
import math
import re
from collections.abc import Callable, Collection
from typing import Any

from simpleeval import DEFAULT_OPERATORS, EvalWithCompoundTypes, InvalidExpression

from llmq.base.errors import ConfigError
from llmq.options.option_types import parse_size

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
    """One condition. text: as it is written. names: of all options. ConfigError if it is none."""

    def __init__(self, text: str, names: Collection[str]):
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
