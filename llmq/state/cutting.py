"""Lay out the parameters of a slab so that shards of one size cut no matrix.

    shard 0                      | shard 1
    down, o, …          gap, gate|up, qkv, …      gap

A parameter that holds several matrices of Hugging Face, as products read it, may lie across one
border between two of them. Shards are as long as the fullest one, so that collectives stay as they
are: a slab of few matrices on many ranks is longer than its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, permutations, product
from typing import NamedTuple

from llmq.runtime.arena import align_up
from llmq.state.params import ELEMENT_ALIGN, Param, Slab

FUSED = 3  # parameters of several matrices in a slab, up to which dividing them is tried
WAYS = 256  # that are tried at most


class Cut(NamedTuple):
    """offsets: the first element of each parameter; the lowest is 0. shard_size: elements."""

    offsets: tuple[int, ...]
    shard_size: int


@lru_cache(maxsize=64)  # blocks are alike
def cut(sizes: tuple[tuple[int, ...], ...], shards: int) -> Cut:
    """The shortest shards that are found.

    sizes: of each parameter the elements of its matrices in their order; it may be cut between any
    two of these.
    """
    return min(_cuts(sizes, shards), key=lambda found: found.shard_size)


def _cuts(sizes: tuple[tuple[int, ...], ...], shards: int) -> Iterator[Cut]:
    """Ways to lay parameters out, those that cut the fewest first."""
    fused = [i for i, parts in enumerate(sizes) if len(parts) > 1]
    if len(fused) > FUSED:
        fused = []
    ways = product(*(range(len(sizes[i])) for i in fused))  # matrices before a border; 0: no border
    ways = sorted(ways, key=lambda way: sum(count > 0 for count in way))
    for way in ways[:WAYS]:
        divided = {i: sum(sizes[i][:count]) for i, count in zip(fused, way, strict=True) if count}
        few = min(shards, 2 * len(divided) + 1)  # borders with shards between them, or without
        for borders in permutations(range(1, few), len(divided)):
            found = _lay_out(sizes, shards, divided, dict(zip(divided, borders, strict=True)))
            if min(found.offsets) == 0:
                yield found


def _lay_out(
    sizes: tuple[tuple[int, ...], ...], shards: int, before: dict[int, int], border: dict[int, int]
) -> Cut:
    """The largest parameter first, each one into the emptiest shard.

    before, border: of those that lie across a border, the elements before it, and the shard behind
    it.
    """
    total = [sum(parts) for parts in sizes]
    heads, ends = [0] * shards, [0] * shards  # of each shard, from its beginning and from its end
    for i, elements in before.items():
        ends[border[i] - 1] = elements
        heads[border[i]] = total[i] - elements
    start: dict[int, tuple[int, int]] = {}  # shard, and element in it
    for i in sorted(range(len(sizes)), key=lambda i: -total[i]):
        if i not in before:
            shard = min(range(shards), key=lambda s: heads[s] + ends[s])
            start[i] = shard, heads[shard]
            heads[shard] += total[i]
    size = max(head + end for head, end in zip(heads, ends, strict=True))
    offsets = [
        border[i] * size - before[i] if i in before else start[i][0] * size + start[i][1]
        for i in range(len(sizes))
    ]
    return Cut(tuple(offsets), size)


def between_matrices(slab: Slab, shards: int) -> Slab:
    """The slab with its parameters in such places that no matrix is in two shards."""
    offsets, size = cut(tuple(_sizes(param) for param in slab.params), shards)
    params = [replace(p, offset=at) for p, at in zip(slab.params, offsets, strict=True)]
    return replace(
        slab,
        params=tuple(sorted(params, key=lambda param: param.offset)),
        size=shards * size,
        shard_size=size,
        whole_matrices=True,
    )


def _sizes(param: Param) -> tuple[int, ...]:
    """Elements between the places where a parameter may be cut, its gap included."""
    stops = [part.stop * param.columns for part in param.hf]
    inner = [stop for stop in stops if stop < param.size and stop % ELEMENT_ALIGN == 0]
    edges = [0, *sorted(inner), align_up(param.size, ELEMENT_ALIGN)]
    return tuple(stop - start for start, stop in pairwise(edges))
