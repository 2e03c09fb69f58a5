"""How the backward of attention is divided: by sequences, then by heads.

The library's workspace grows with the square of the sequence length for every query head that one
call computes (`llmq.runtime.cudnn.backward_workspace_bytes`). Parts beyond one for each sequence
divide heads: whole key/value heads with their query heads first, whose gradients stay where they
are in one call; then the query heads of each key/value head, whose parts of its gradients have to
be added up.
"""

from itertools import pairwise
from typing import NamedTuple

from llmq.runtime.kernel import ceil_div


class HeadGroup(NamedTuple):
    """Heads that one call computes: query heads from `first`, key/value heads from `first_kv`."""

    first: int
    count: int
    first_kv: int
    kv_count: int

    @property
    def sizes(self) -> tuple[int, int]:
        """How many query heads and key/value heads."""
        return self.count, self.kv_count


def split(batch: int, chunks: int) -> tuple[int, int]:
    """Sequences that are computed at a time, and parts of the heads of one that are."""
    return ceil_div(batch, chunks), ceil_div(chunks, batch)


def splits_query_heads(num_kv_heads: int, parts: int) -> bool:
    """Whether so many parts divide the query heads of one key/value head."""
    return parts > num_kv_heads


def head_groups(num_heads: int, num_kv_heads: int, parts: int) -> list[HeadGroup]:
    """Groups of a sequence's heads, at least `parts`; sizes of groups differ by one at the most.

    parts: up to num_heads.
    """
    group = num_heads // num_kv_heads
    if not splits_query_heads(num_kv_heads, parts):
        spans = _spans(num_kv_heads, parts)
        return [HeadGroup(first * group, n * group, first, n) for first, n in spans]
    return [
        HeadGroup(kv_head * group + first, n, kv_head, 1)
        for kv_head in range(num_kv_heads)
        for first, n in _spans(group, ceil_div(parts, num_kv_heads))
    ]


def _spans(count: int, parts: int) -> list[tuple[int, int]]:
    """First of each part, and how many it has."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


def divisions(batch: int, num_heads: int, num_kv_heads: int) -> list[int]:
    """Numbers of parts, ascending: each one's calls compute fewer heads than those before it.

    Divisors of the batch, then multiples of it.
    """
    found = [n for n in range(1, batch + 1) if batch % n == 0]
    heads = num_heads
    for parts in range(2, num_heads + 1):
        groups = head_groups(num_heads, num_kv_heads, parts)
        largest = max(group.count for group in groups)
        if largest < heads:
            found.append(batch * len(groups))
            heads = largest
    return found
