"""A rule about options, and the one engine that evaluates rules (the table is `rules.py`): what is
implied, refused and idle, what --help says beside an option, what `llmq plan --fit` may try, and
which options must not change a bit in `llmq verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from llmq.base.errors import ConfigError
from llmq.options.option_types import Option, options_of

Options = Any
"""A TrainConfig, which is made with these rules and lies above them."""

Changes = dict[str, Any]
"""Values of options by field name."""

IMPLY, REFUSE, IDLE, SAVE, EXACT = "imply", "refuse", "idle", "save", "exact"
"""Effects of rules. imply: sets options. refuse: is an error. idle: is a warning. save: --fit and
advice may try the values that it sets. exact: `llmq verify` expects the same bits without it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """One sentence about one option.

    group: in place of the option, each of this group, where its value is not the default. when:
    called with the option's value, the options, and one fact if it has a third argument, known by
    its name; true: the rule applies. text: a line for str.format with {value}, {flag}, {shown}
    ("--seed 5"), {given} ("--seed=5"), {found} (what `when` has returned), the fact and the options
    by their names. sets: values of options, or what makes them from the options. use: of savers,
    who tries them. help: a clause of the option's --help. last_word: no other idle rule of this
    option is told where this one applies. given: where the value is not the default.
    """

    option: str = ""
    effect: str
    group: str = ""
    when: Callable[..., Any] | None = None
    text: str = ""
    sets: Changes | Callable[[Options], Changes] | None = None
    use: str = ""
    help: str = ""
    last_word: bool = False
    given: bool = False

    @property
    def about(self) -> str | None:
        """The name of what must be known beside the options, such as "model"."""
        code = self.when.__code__ if self.when is not None else None
        return code.co_varnames[2] if code is not None and code.co_argcount == 3 else None

    def each(self, config_class: type) -> Iterator[Rule]:
        """The rule of each option that it is of."""
        if not self.group:
            yield self
            return
        for name, option in _table(config_class).items():
            if option.group == self.group:
                yield replace(self, option=name, group="", given=True)

    def found(self, options: Options, *fact: Any) -> Any:
        """The value of `when`; true where there is no condition."""
        value = getattr(options, self.option)
        if self.given and value == getattr(_defaults(type(options)), self.option):
            return None
        return True if self.when is None else self.when(value, options, *fact)

    def changes(self, options: Options, *fact: Any) -> Changes:
        """The values that it sets, by field name; {} where it does not apply."""
        if not self.found(options, *fact):
            return {}
        return self.sets(options) if callable(self.sets) else dict(self.sets)

    def line(self, options: Options, found: Any, **fact: Any) -> str:
        """The text about these options."""
        option, value = _table(type(options))[self.option], getattr(options, self.option)
        words = {"value": value, "flag": option.flag, "found": found, **fact}
        words["given"] = " ".join(option.spelled(value))
        words["shown"] = words["given"].replace("=", " ", 1)
        return self.text.format_map(_Words(options, words))


class _Words(dict):
    """Words of a text: those given, and values of options by their names."""

    def __init__(self, options: Options, words: Mapping[str, Any]):
        super().__init__(words)
        self._options = options

    def __missing__(self, name: str) -> Any:
        return getattr(self._options, name)


@cache
def _table(config_class: type) -> dict[str, Option]:
    return options_of(config_class)


@cache
def _defaults(config_class: type) -> Options:
    return config_class()


class Rules:
    """A table of rules, and what follows from it. A fact is one keyword, and only the rules about
    it are evaluated; without one those about nothing but the options."""

    def __init__(self, table: Iterable[Rule]):
        """table: in the order in which errors and warnings are looked for."""
        self.table = tuple(table)
        self._chosen: dict[tuple[type, str, str | None], list[Rule]] = {}

    def of(self, options: Options, effect: str, about: str | None = None) -> list[Rule]:
        """The rules with this effect that are about this fact."""
        key = (type(options), effect, about)
        if key not in self._chosen:
            rules = [rule for rule in self.table if (rule.effect, rule.about) == (effect, about)]
            self._chosen[key] = [each for rule in rules for each in rule.each(type(options))]
        return self._chosen[key]

    def imply(self, options: Options) -> None:
        """Set what is implied. options: just made, and nobody else's yet, because they change."""
        for rule in self.of(options, IMPLY):
            for name, value in rule.changes(options).items():
                object.__setattr__(options, name, value)

    def implied_by(self, name: str, options: Options) -> str | None:
        """The flag that switches this option on in normalized options, if one does.

        The one at the beginning, where another one follows from it.
        """
        for rule in self.of(options, IMPLY):
            if rule.option != name and rule.changes(options).get(name) is True:
                option, value = _table(type(options))[rule.option], getattr(options, rule.option)
                own = " ".join(option.spelled(value)).replace("=", " ", 1)
                return self.implied_by(rule.option, options) or own
        return None

    def check(self, options: Options, **fact: Any) -> None:
        """Raise ConfigError with the line of the first rule that refuses these options."""
        for rule in self.of(options, REFUSE, *fact):
            found = rule.found(options, *fact.values())
            if found:
                raise ConfigError(rule.line(options, found, **fact))

    def idle(self, options: Options, **fact: Any) -> list[str]:
        """One line for every option that has another value than its default, and no effect."""
        told = []
        for rule in self.of(options, IDLE, *fact):
            found = rule.found(options, *fact.values())
            told += [(rule, found)] if found else []
        final = {rule.option for rule, _ in told if rule.last_word}
        told = [each for each in told if each[0].last_word or each[0].option not in final]
        return [rule.line(options, found, **fact) for rule, found in told if rule.text]

    def help(self, name: str, text: str) -> str:
        """The help of an option: its own text, with what its rules add: a clause in place of
        {rule}; else one that ends with a colon before it, and others behind it."""
        for clause in self._clauses(name):
            if "{rule}" in text:
                text = text.replace("{rule}", clause)
            elif clause.endswith(":"):
                text = f"{clause} {text[0].lower()}{text[1:]}"
            else:
                text = f"{text}; {clause}"
        return text

    def _clauses(self, name: str) -> Iterator[str]:
        return (rule.help for rule in self.table if rule.option == name and rule.help)

    def savers(self, use: str) -> tuple[Rule, ...]:
        """The rules whose values may be tried for this use, in their order."""
        return tuple(rule for rule in self.table if rule.effect == SAVE and rule.use == use)

    def exact(self, options: Options, **fact: Any) -> Changes:
        """Values of other options with which a run must compute the same bits: the defaults, where
        a rule does not say another one."""
        found: Changes = {}
        for rule in self.of(options, EXACT, *fact):
            if rule.found(options, *fact.values()):
                default = getattr(_defaults(type(options)), rule.option)
                found |= rule.sets or {rule.option: default}
        return found


# ------------------------------------------------------------------------------------------------
# How rules are written: one for each of the options that are named


def each(names: str, effect: str, when: Any, text: str = "", **more: Any) -> Iterator[Rule]:
    """A rule for each of the options that are named."""
    return (Rule(option=n, effect=effect, when=when, text=text, **more) for n in names.split())


def default(name: str, value: Callable[[Options], Any], when: Any = None, **more: Any) -> Rule:
    """A value that the option has where it is not given."""

    def missing(v: Any, o: Options) -> bool:
        return v is None and (when is None or when(v, o))

    return Rule(option=name, effect=IMPLY, when=missing, sets=lambda o: {name: value(o)}, **more)


def switches(name: str, *others: str, when: Any = lambda v, o: v, help: str = "") -> Rule:
    """An option that switches others on."""
    return Rule(option=name, effect=IMPLY, when=when, sets=dict.fromkeys(others, True), help=help)


def refused(names: str, when: Any, text: str, **more: Any) -> Iterator[Rule]:
    """Options that are an error. text: what follows "--flag: "."""
    return each(names, REFUSE, when, f"{{flag}}: {text}", **more)


def idle(names: str, when: Any, text: str, **more: Any) -> Iterator[Rule]:
    """Options that have no effect though they have another value than the default. text: the line,
    or what follows "--flag=value" where it begins with "has no effect"."""
    text = f"{{given}} {text}" if text.startswith("has no effect") else text
    return each(names, IDLE, when, text, given=True, **more)


def without(names: str, has: Callable[[Options], Any], what: str) -> Iterator[Rule]:
    """Options that have no effect without others. has: whether these are given; what: which."""
    return idle(names, lambda v, o: not has(o), f"has no effect without {what}")
