"""Shares of a layer's heads for the ranks that divide sequences (--context-parallel)."""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

Shares = tuple[tuple[int | None, ...], ...]
"""For each rank the numbers of its heads, equally many. None: a head of zeros, whose results nobody
reads."""


class HeadShares(NamedTuple):
    """Heads of each rank. The query heads of a rank's first key head come first, then the query
    heads of its second key head, equally many for each. copies: number of copies of each key head,
    which divide its query heads."""

    queries: Shares
    keys: Shares
    copies: int


@cache
def head_shares(query: int, kv: int, ranks: int) -> HeadShares:
    """Divide `query` heads, the same number for each of `kv` key heads, among `ranks`.

    Ranks compute equally many heads, so that key heads are repeated and heads of zeros are added
    where the numbers do not divide. The number of copies is chosen for the fewest query heads and
    key heads together: 14 query heads and 2 key heads on 4 ranks are 16 and 4, two copies of each
    key head with 4 and 3 of its 7 query heads.
    """
    group = query // kv  # query heads of a key head

    def heads(copies: int) -> tuple[int, int, int]:
        keys = ranks * ceil(copies * kv / ranks)
        queries = keys * ceil(group / copies)
        return queries + keys, queries, copies

    total, of_queries, copies = min(map(heads, range(1, group + 1)))
    of_keys = total - of_queries
    each = of_queries // of_keys  # query heads of a copy
    keys: list[int | None] = [key for key in range(kv) for _ in range(copies)]
    queries: list[int | None] = []
    for place in range(of_keys):
        key, first = divmod(place, copies)
        heads_of = range(first * each, min((first + 1) * each, group)) if key < kv else ()
        mine = [key * group + head for head in heads_of]
        queries += [*mine, *[None] * (each - len(mine))]
    keys += [None] * (of_keys - len(keys))
    return HeadShares(_divided(queries, ranks), _divided(keys, ranks), copies)


def _divided(heads: list[int | None], ranks: int) -> Shares:
    each = len(heads) // ranks
    return tuple(tuple(heads[rank * each : (rank + 1) * each]) for rank in range(ranks))
