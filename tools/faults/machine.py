"""The machines' common part, and how they are run.

A machine tries one fault at a time. Number n of a seed is always the same fault, so that one that
was bad can be tried again: `--only`. Outcomes have categories:

    traceback   an end that is no single line, or a status that is none of llmq's
    hang        no end
    lost        a checkpoint, model or other result that was complete is no longer there
    touched     a file of somebody else is gone or changed
    changed     another result without a word
    left        what is ours stays behind after a command that ended well
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

CATEGORIES = ("traceback", "hang", "lost", "touched", "changed", "left")
Problems = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """kind: the row of the table. what: the fault, in words. problems: category and text."""

    kind: str
    what: str
    problems: Problems


class Machine(Protocol):
    """name: on the command line. title: in the table. quick: faults that the tests try. full: those
    of a report."""

    name: str
    title: str
    quick: int
    full: int

    def prepare(self, folder: Path, rng: random.Random) -> None:
        """Once, in a folder of all machines, each of which removes what it has tried."""

    def attempt(self, rng: random.Random) -> Outcome:
        """One fault, which rng decides."""


@dataclass
class Tally:
    """The tally of one machine. commit: of the tree. seconds: how long it ran."""

    title: str
    seed: int
    commit: str
    seconds: float = 0.0
    tried: Counter[str] = field(default_factory=Counter)
    bad: dict[str, Counter[str]] = field(default_factory=dict)
    worst: list[str] = field(default_factory=list)

    def add(self, number: int, outcome: Outcome) -> None:
        """Count one."""
        self.tried[outcome.kind] += 1
        categories = {category for category, _ in outcome.problems}
        self.bad.setdefault(outcome.kind, Counter()).update(categories)
        self.bad[outcome.kind]["bad"] += bool(categories)
        self.worst += [f"{number}: {outcome.what}: {c}: {text}" for c, text in outcome.problems]

    def record(self) -> dict[str, object]:
        """The record for JSON."""
        fields = {"title": self.title, "seed": self.seed, "commit": self.commit}
        fields |= {"seconds": round(self.seconds)}
        bad = {kind: dict(counts) for kind, counts in self.bad.items()}
        return fields | {"tried": dict(self.tried), "bad": bad, "worst": self.worst}


def attempts(
    machine: Machine,
    seed: int,
    seconds: float,
    tries: int | None,
    only: list[int],
) -> Iterator[tuple[int, Outcome]]:
    """Faults until the time is over or the number is reached."""
    end = time.monotonic() + seconds
    for number in only or itertools.count():
        if not only and (time.monotonic() >= end if tries is None else number >= tries):
            return
        yield number, machine.attempt(random.Random(f"{seed} {machine.name} {number}"))
