"""Few rows that together hold every pair of values: instead of a whole product of options."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product

Row = Mapping[str, Hashable]


def pairs(row: Row) -> set[frozenset]:
    """The pairs of (column, value) that a row holds; of a row of one column, that one."""
    return {frozenset(pair) for pair in combinations(row.items(), min(2, len(row)))}


def covering(rows: Iterable[Row]) -> list[Row]:
    """Some of the rows, in their order, that hold every pair that any of them holds.

    Greedy: the row with most new pairs next, the first of equals. Rows may differ in columns, and
    combinations that are not allowed are simply not among them.
    """
    found = [(pairs(row), row) for row in rows]
    missing = set().union(*(held for held, _ in found))
    queue = [(-len(held), i) for i, (held, _) in enumerate(found)]
    heapq.heapify(queue)
    chosen = []
    while missing:
        _, i = heapq.heappop(queue)
        gain = len(found[i][0] & missing)
        if queue and (-gain, i) > queue[0]:  # others have become better; gains only shrink
            heapq.heappush(queue, (-gain, i))
            continue
        chosen.append(i)
        missing -= found[i][0]
    return [found[i][1] for i in sorted(chosen)]


def pairwise(**columns: Sequence[Hashable]) -> list[tuple]:
    """Tuples of values, one a column, in which every pair of values of two columns occurs."""
    rows = (dict(zip(columns, values, strict=True)) for values in product(*columns.values()))
    return [tuple(row.values()) for row in covering(rows)]
