"""Conditions on options, such as `batch-size * seq-len <= 32768`: parsed here, never evaluated as
Python.

From what binds least to what binds most: `or`, `and`, `not`, comparisons (`1 <= batch-size < 8`,
`model-dtype in ['bf16', 'fp32']`), `+ -`, `* / // %`, a sign, parentheses. A name is an option with
its hyphens, so that a minus between two names stands between spaces. Text stands in quotes; a
number may have a unit of bytes (16GiB); `true`, `false`, and `none` for an option that is not set.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Collection
from typing import Any

from llmq.base.errors import ConfigError
from llmq.options.option_types import parse_size

Lookup = Callable[[str], Any]
"""The value of an option of this name."""

Node = Callable[[Lookup], Any]
"""A part of a condition: its value with these options."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d[\d.]*[eE][+-]\d+|\d[\w.]*)|(?P<text>'[^']*'|\"[^\"]*\")|(?P<name>[A-Za-z_]\w*(?:-\w+)*)"
    r"|(?P<sign><=|>=|==|!=|//|[-+*/%<>()\[\],]))"
)
_WORDS = {"true": True, "false": False, "none": None}
_KEYWORDS = ("and", "or", "not", "in")
_ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_EQUAL = {"==": operator.eq, "!=": operator.ne}
_SUM = {"+": operator.add, "-": operator.sub}
_PRODUCT = {
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_DEEPEST = 50  # of parentheses and signs within each other


class Condition:
    """One condition. text: as it is written. names: of all options. ConfigError if it is none."""

    def __init__(self, text: str, names: Collection[str]):
        self.text = text
        self._node = _Parser(text, names).whole()

    def holds(self, lookup: Lookup) -> bool:
        """With these values of options. ConfigError where they do not go together."""
        try:
            return _truth(self._node(lookup))
        except (ConfigError, ZeroDivisionError, OverflowError) as error:
            raise ConfigError(f"where: {self.text}: {error}") from None


class _Parser:
    """Recursive descent, one method for each level of binding."""

    def __init__(self, text: str, names: Collection[str]):
        self.text, self.names, self.place, self.depth = text, names, 0, 0
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                raise self.wrong(f"cannot read {text[at:].strip()[:20]!r}")
            kind, word = str(found.lastgroup), found[str(found.lastgroup)]
            self.tokens.append(("sign" if word in _KEYWORDS else kind, word))
            at = found.end()

    def wrong(self, why: str) -> ConfigError:
        return ConfigError(f"where: {self.text}: {why}")

    def whole(self) -> Node:
        node = self.either()
        if self.place < len(self.tokens):
            raise self.wrong(f"expected its end at {self.tokens[self.place][1]!r}")
        return node

    def taken(self, *signs: str) -> str | None:
        """The next token, which is passed, if it is one of these."""
        if self.place < len(self.tokens) and self.tokens[self.place] in [
            ("sign", s) for s in signs
        ]:
            self.place += 1
            return self.tokens[self.place - 1][1]
        return None

    def required(self, sign: str) -> None:
        if self.taken(sign) is None:
            raise self.wrong(f"expected {sign!r} at {self.here()}")

    def here(self) -> str:
        """The next token, for a message."""
        return repr(self.tokens[self.place][1]) if self.place < len(self.tokens) else "its end"

    def either(self) -> Node:
        parts = [self.both()]
        while self.taken("or"):
            parts.append(self.both())
        if len(parts) == 1:
            return parts[0]
        return lambda lookup: any(_truth(part(lookup)) for part in parts)

    def both(self) -> Node:
        parts = [self.negated()]
        while self.taken("and"):
            parts.append(self.negated())
        if len(parts) == 1:
            return parts[0]
        return lambda lookup: all(_truth(part(lookup)) for part in parts)

    def negated(self) -> Node:
        if self.taken("not"):
            part = self.deeper(self.negated)
            return lambda lookup: not _truth(part(lookup))
        return self.compared()

    def compared(self) -> Node:
        parts, signs = [self.added()], []
        while sign := self.taken(*_ORDER, *_EQUAL, "in", "not"):
            if sign == "not":
                self.required("in")
                sign = "not in"
            signs.append(sign)
            parts.append(self.added())

        def node(lookup: Lookup) -> bool:
            values = [part(lookup) for part in parts]
            pairs = zip(signs, values, values[1:], strict=False)
            return all(_compare(*pair) for pair in pairs)

        return node if signs else parts[0]

    def added(self) -> Node:
        return self.folded(_SUM, self.multiplied)

    def multiplied(self) -> Node:
        return self.folded(_PRODUCT, self.signed)

    def folded(
        self, signs: dict[str, Callable[[Any, Any], Any]], inner: Callable[[], Node]
    ) -> Node:
        """Parts joined by these signs, from left to right."""
        first, rest = inner(), []
        while sign := self.taken(*signs):
            rest.append((sign, inner()))

        def node(lookup: Lookup) -> Any:
            value = _number(first(lookup), rest[0][0])
            for sign, part in rest:
                value = signs[sign](value, _number(part(lookup), sign))
            return value

        return node if rest else first

    def signed(self) -> Node:
        if self.taken("-"):
            part = self.deeper(self.signed)
            return lambda lookup: -_number(part(lookup), "-")
        return self.single()

    def deeper(self, inner: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self.wrong("it is nested too deeply")
        node = inner()
        self.depth -= 1
        return node

    def single(self) -> Node:
        if self.taken("("):
            node = self.deeper(self.either)
            self.required(")")
            return node
        if self.taken("["):
            items = [] if self.taken("]") else [self.deeper(self.either)]
            while items and self.taken(","):
                items.append(self.deeper(self.either))
            if items:
                self.required("]")
            return lambda lookup: [item(lookup) for item in items]
        if self.place == len(self.tokens) or self.tokens[self.place][0] == "sign":
            raise self.wrong(f"expected a value at {self.here()}")
        kind, word = self.tokens[self.place]
        self.place += 1
        if kind == "name" and word.lower() not in _WORDS:
            return self.option(word)
        value = word[1:-1] if kind == "text" else _WORDS[word.lower()] if kind == "name" else None
        if kind == "number":
            value = self.number(word)
        return lambda lookup: value

    def number(self, word: str) -> int | float:
        for parse in (int, float, parse_size):
            try:
                return parse(word)
            except ValueError:
                continue
        raise self.wrong(f"{word} is no number")

    def option(self, word: str) -> Node:
        name = word.replace("_", "-")
        if name not in self.names:
            near = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {near[0]}?" if near else "text stands in quotes"
            raise self.wrong(f"unknown option {word}, {hint}")
        return lambda lookup: lookup(name)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{_shown(value)} is neither true nor false")
    return value


def _number(value: Any, sign: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{sign} needs numbers, got {_shown(value)}")
    return value


def _compare(sign: str, left: Any, right: Any) -> bool:
    if sign in _EQUAL:
        return _EQUAL[sign](left, right)
    if sign in ("in", "not in"):
        if not isinstance(right, list | tuple):
            raise ConfigError(f"{sign} needs a list, got {_shown(right)}")
        return (left in right) == (sign == "in")
    if not (isinstance(left, str) and isinstance(right, str)):
        left, right = _number(left, sign), _number(right, sign)
    return _ORDER[sign](left, right)


def _shown(value: Any) -> str:
    """As a condition spells it."""
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)
