"""Times of launches by their kinds, as card files keep them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from llmq.runtime.timing import LaunchTime

Table = dict[str, list[list[Any]]]
"""By the name of a kind: [sizes, seconds], one of each size."""


def table_of(times: Iterable[LaunchTime]) -> Table:
    """The medians of launches of the main stream that take any time."""
    found: defaultdict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for time in times:
        if time.main and time.kind is not None and time.ms > 0 and min(time.kind.sizes) > 0:
            found[time.kind].append(time.ms / 1e3)
    return _medians(found)


def merged(tables: Iterable[Table]) -> Table:
    """Of several measurements; where sizes are equal, the median of them."""
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
