"""Rule and Rules: rules about options and the engine that evaluates them; `rules.py` has the table.
Rules say which values are implied, refused or idle, complete the text of --help, list values for
`llmq plan --fit`, and name the options that must change no bit in `llmq verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from llmq.base.errors import ConfigError
from llmq.options.option_types import Option, options_of

Options = Any
"""A TrainConfig, which is defined with these rules, in a module above."""

Changes = dict[str, Any]
"""Values of options by field name."""

IMPLY, REFUSE, IDLE, SAVE, EXACT = "imply", "refuse", "idle", "save", "exact"
"""Effects of rules. imply: sets options. refuse: raises an error. idle: warns. save: --fit and
advice may try its values. exact: `llmq verify` expects the same bits without the option."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """One statement about one option.

    group: instead of `option`, each option of this group whose value is not the default. when:
    condition on the option's value, the options, and, if it has a third argument, the fact of that
    name; the rule applies if the condition is true. text: message for str.format with {value},
    {flag}, {shown} ("--seed 5"), {given} ("--seed=5"), {found} (the result of `when`), the fact,
    and options by name. sets: values of options, or a function from the options to values. use: the
    search that tries a save rule. help: clause for the option's --help. last_word: True hides other
    idle rules of this option. given: True if the rule needs a value other than the default.
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
        """Name of the fact that the condition needs, such as "model"; None without a fact."""
        code = self.when.__code__ if self.when is not None else None
        return code.co_varnames[2] if code is not None and code.co_argcount == 3 else None

    def each(self, config_class: type) -> Iterator[Rule]:
        """Yield the rule for each option of its group, or the rule itself."""
        if not self.group:
            yield self
            return
        for name, option in _table(config_class).items():
            if option.group == self.group:
                yield replace(self, option=name, group="", given=True)

    def found(self, options: Options, *fact: Any) -> Any:
        """Return the result of `when`; True without a condition, None if the option has its default
        and `given` is set."""
        value = getattr(options, self.option)
        if self.given and value == getattr(_defaults(type(options)), self.option):
            return None
        return True if self.when is None else self.when(value, options, *fact)

    def changes(self, options: Options, *fact: Any) -> Changes:
        """Return the values that the rule sets, by field name; {} if it does not apply."""
        if not self.found(options, *fact):
            return {}
        return self.sets(options) if callable(self.sets) else dict(self.sets)

    def line(self, options: Options, found: Any, **fact: Any) -> str:
        """Return the message about these options."""
        option, value = _table(type(options))[self.option], getattr(options, self.option)
        words = {"value": value, "flag": option.flag, "found": found, **fact}
        words["given"] = " ".join(option.spelled(value))
        words["shown"] = words["given"].replace("=", " ", 1)
        return self.text.format_map(_Words(options, words))


class _Words(dict):
    """Words of a message: given words, and values of options by name."""

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
    """A table of rules and its evaluation. A fact is passed as one keyword, and selects the rules
    about this fact; without a fact only rules about options alone count."""

    def __init__(self, table: Iterable[Rule]):
        """table: rules in the order in which errors and warnings are reported."""
        self.table = tuple(table)
        self._chosen: dict[tuple[type, str, str | None], list[Rule]] = {}

    def of(self, options: Options, effect: str, about: str | None = None) -> list[Rule]:
        """Return the rules with this effect about this fact."""
        key = (type(options), effect, about)
        if key not in self._chosen:
            rules = [rule for rule in self.table if (rule.effect, rule.about) == (effect, about)]
            self._chosen[key] = [each for rule in rules for each in rule.each(type(options))]
        return self._chosen[key]

    def imply(self, options: Options) -> None:
        """Set implied values in place. options: new and not yet shared, because they change."""
        for rule in self.of(options, IMPLY):
            for name, value in rule.changes(options).items():
                object.__setattr__(options, name, value)

    def implied_by(self, name: str, options: Options) -> str | None:
        """Return the flag that switches this option on in normalized options, the first flag of a
        chain; None if no flag does."""
        for rule in self.of(options, IMPLY):
            if rule.option != name and rule.changes(options).get(name) is True:
                option, value = _table(type(options))[rule.option], getattr(options, rule.option)
                flag = " ".join(option.spelled(value)).replace("=", " ", 1)
                return self.implied_by(rule.option, options) or flag
        return None

    def check(self, options: Options, **fact: Any) -> None:
        """Raise ConfigError with the message of the first rule that refuses these options."""
        for rule in self.of(options, REFUSE, *fact):
            found = rule.found(options, *fact.values())
            if found:
                raise ConfigError(rule.line(options, found, **fact))

    def idle(self, options: Options, **fact: Any) -> list[str]:
        """Return a line for every option that differs from its default and has no effect."""
        applying = []
        for rule in self.of(options, IDLE, *fact):
            found = rule.found(options, *fact.values())
            applying += [(rule, found)] if found else []
        final = {rule.option for rule, _ in applying if rule.last_word}
        applying = [each for each in applying if each[0].last_word or each[0].option not in final]
        return [rule.line(options, found, **fact) for rule, found in applying if rule.text]

    def help(self, name: str, text: str) -> str:
        """Return an option's help with the clauses of its rules. A clause replaces {rule}; else a
        clause that ends with a colon stands before the help, and other clauses behind."""
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
        """Return the save rules for this use, in table order."""
        return tuple(rule for rule in self.table if rule.effect == SAVE and rule.use == use)

    def exact(self, options: Options, **fact: Any) -> Changes:
        """Return values of other options with which a run must compute the same bits: defaults,
        unless a rule sets other values."""
        found: Changes = {}
        for rule in self.of(options, EXACT, *fact):
            if rule.found(options, *fact.values()):
                default = getattr(_defaults(type(options)), rule.option)
                found |= rule.sets or {rule.option: default}
        return found


# ------------------------------------------------------------------------------------------------
# How rules are written: one for each of the options that are named


def each(names: str, effect: str, when: Any, text: str = "", **more: Any) -> Iterator[Rule]:
    """A rule for each of the options in `names`, separated by blanks."""
    return (Rule(option=n, effect=effect, when=when, text=text, **more) for n in names.split())


def default(name: str, value: Callable[[Options], Any], when: Any = None, **more: Any) -> Rule:
    """A rule for the value of an option that is not given."""

    def missing(v: Any, o: Options) -> bool:
        return v is None and (when is None or when(v, o))

    return Rule(option=name, effect=IMPLY, when=missing, sets=lambda o: {name: value(o)}, **more)


def switches(name: str, *others: str, when: Any = lambda v, o: v, help: str = "") -> Rule:
    """A rule for an option that switches other options on."""
    return Rule(option=name, effect=IMPLY, when=when, sets=dict.fromkeys(others, True), help=help)


def refused(names: str, when: Any, text: str, **more: Any) -> Iterator[Rule]:
    """Rules for options that are an error. text: follows "--flag: "."""
    return each(names, REFUSE, when, f"{{flag}}: {text}", **more)


def idle(names: str, when: Any, text: str, **more: Any) -> Iterator[Rule]:
    """Rules for options that differ from their default and have no effect. text: the line, or the
    words after "--flag=value" if it begins with "has no effect"."""
    text = f"{{given}} {text}" if text.startswith("has no effect") else text
    return each(names, IDLE, when, text, given=True, **more)


def without(names: str, has: Callable[[Options], Any], what: str) -> Iterator[Rule]:
    """Rules for options that have no effect unless other options are given. has: True if these are
    given; what: the names of these."""
    return idle(names, lambda v, o: not has(o), f"has no effect without {what}")
