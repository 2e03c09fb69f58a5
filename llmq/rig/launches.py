"""Times of launches by their kinds, as card files keep them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from llmq.runtime.timing import LaunchTime

BEHIND = 0.1  # of a step, see in_time

Table = dict[str, list[list[Any]]]
"""By the name of a kind: [sizes, seconds], one of each size."""


def table_of(times: Iterable[LaunchTime]) -> Table:
    """The medians of launches of the main stream that take any time."""
    found: defaultdict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for time in times:
        if time.main and time.kind is not None and time.ms > 0 and min(time.kind.sizes) > 0:
            found[time.kind].append(time.ms / 1e3)
    return _medians(found)


def as_in_steps(rounds: list[list[LaunchTime]], seconds: float) -> Table:
    """The medians of steps whose launches were timed, as they are when nothing is timed.

    Marks around launches, and the waits for them, leave a GPU another clock, and gaps between
    launches are in none of them: all are longer or shorter by one factor, by which those of a step
    take the `seconds` that a step takes.
    """
    table = table_of(time for times in rounds for time in times)
    medians = {(name, tuple(s)): t for name, points in table.items() for s, t in points}
    total = sum(medians.get(time.kind, time.ms / 1e3) for time in rounds[0] if time.main)
    factor = seconds / total if total else 1.0
    return {name: [[s, factor * t] for s, t in points] for name, points in table.items()}


def in_time(idle: float) -> bool:
    """Whether a step's launches, timed by themselves, are good for more than their sum.

    idle: the part of the step in which none of them ran, negative where they took longer than it.
    By more than BEHIND of it no clock does that: the GPU waited for the host between a launch and
    its marks, the longer the shorter a launch is, and no factor makes up for it.
    """
    return idle > -BEHIND


def merged(tables: Iterable[Table]) -> Table:
    """One table made of several measurements; where sizes are equal, the median of them."""
    found: defaultdict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for table in tables:
        for name, points in table.items():
            for sizes, seconds in points:
                found[name, tuple(sizes)].append(seconds)
    return _medians(found)


def _medians(found: Mapping[tuple[str, tuple[int, ...]], list[float]]) -> Table:
    table: Table = {}
    for (name, sizes), seconds in sorted(found.items()):
        table.setdefault(name, []).append([list(sizes), statistics.median(seconds)])
    return table
