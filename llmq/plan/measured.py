"""How long launches take by what was measured on a machine: between its sizes, and for its like."""

from __future__ import annotations

import functools
import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

from llmq.options.card_file import CardFile, Points
from llmq.runtime.cost import LONGER, Cost, Kind

NEAREST = 4  # products that one of another size is compared with
TILE = 128 * 256  # elements of a product's result that a multiprocessor computes at a time
TILE_DEPTH = 2048  # longer sums of a product are split among multiprocessors
LARGE = 16 << 20  # bytes from which on a launch shows the memory's rate
# Bytes that products of ours move beside a product's own matrices take so many times as long as
# they would take alone; the second factor is for codes in both layouts, which is more to compute.
# About the means of h100_gemm_swiglu.md, whose rows have 0.6 to 1.8 times and, with codes in both
# layouts, 1.1 to 1.7 times.
EXPOSED, EXPOSED_TRANSPOSED = 0.9, 1.5

Known = dict[tuple[int, ...], float]
"""Median seconds by sizes."""


class More(NamedTuple):
    """The work of a launch beside the library's product of the same matrices. nbytes: what it
    moves. transposes: whether it writes codes in both layouts."""

    nbytes: int = 0
    transposes: bool = False

    @classmethod
    def of(cls, cost: Cost, device_bytes: int) -> More:
        """Nothing of launches that are no such product, or hide what they do besides."""
        if cost.matrices is None:
            return NOTHING
        return cls(max(device_bytes - cost.matrices, 0), cost.transposes)


NOTHING = More()


def exposed(more: More) -> float:
    """So many bytes would take as long, alone, as what a product of ours does besides."""
    return (EXPOSED_TRANSPOSED if more.transposes else EXPOSED) * more.nbytes


class Measured:
    """A card file's launches. A launch that it has no like of is None, and left to the data
    sheet."""

    def __init__(self, file: CardFile):
        self.file = file
        self._by_words: defaultdict[tuple[str, ...], Known] = defaultdict(dict)
        merged: defaultdict[tuple[str, ...], defaultdict[tuple[int, ...], list[float]]]
        merged = defaultdict(lambda: defaultdict(list))
        for name, points in file.launches.items():
            words = tuple(name.split("/"))
            # A product's time has what is computed besides it: no other product is like it.
            longer = not set(LONGER).isdisjoint(words)
            for count in range(len(words) if longer else 1, len(words) + 1):
                for sizes, seconds in points:
                    merged[words[:count]][tuple(sizes)].append(seconds)
        for words, by_sizes in merged.items():
            self._by_words[words] = {s: statistics.median(times) for s, times in by_sizes.items()}
        for name, points in file.launches.items():  # counts more than its like
            self._by_words[tuple(name.split("/"))] |= {tuple(s): times for s, times in points}
        moves = [p for name, p in file.launches.items() if len(p[0][0]) == 1]
        self._least = min((t for points in moves for _, t in points), default=0.0)
        self.bandwidth = _bandwidth(moves)
        self._seconds: dict[tuple[Kind, More], float | None] = {}

    def seconds(
        self, kind: Kind, flops: int, device_bytes: int, more: More = NOTHING
    ) -> float | None:
        """The seconds of one launch that is no attention. more: what its like would not do, which
        takes time of its own."""
        key = (kind, more)
        if key not in self._seconds:
            besides = 0.0 if self.bandwidth is None else exposed(more) / self.bandwidth
            if kind.is_product:
                seconds = self._product(kind, flops, device_bytes - more.nbytes, besides)
            else:
                seconds = self._moves(kind, device_bytes)
            self._seconds[key] = seconds
        return self._seconds[key]

    def nearest(self, kind: Kind) -> tuple[tuple[int, ...], float] | None:
        """Sizes and seconds of the launch of this kind, or its like, that is nearest in size.

        The nearest measurement of attention: of those with its length, head size and window, if
        there is any. They differ in the number of heads alone, which does not change what the
        kernel does.
        """
        known = self._like(kind)
        if not known:
            return None
        known = {s: t for s, t in known.items() if s[1:] == kind.sizes[1:]} or known
        sizes = min(known, key=lambda sizes: _distance(sizes, kind.sizes))
        return sizes, known[sizes]

    def _like(self, kind: Kind) -> Known:
        """The kinds that share the most first words with it, and have as many sizes."""
        words = tuple(kind.name.split("/"))
        counts = range(len(words), 0, -1)
        like = next((self._by_words[words[:n]] for n in counts if words[:n] in self._by_words), {})
        return {sizes: times for sizes, times in like.items() if len(sizes) == len(kind.sizes)}

    def _product(self, kind: Kind, flops: int, device_bytes: int, besides: float) -> float | None:
        """As its own size took, or at the rate of the nearest ones, the more the nearer they are;
        one of LONGER by its depth, between two others.

        The last wave of tiles, half empty as it is on average, counts as work. besides: seconds
        that it takes for what a product does not do, which is by the size of the result.
        """
        known = self._like(kind)
        if not known:
            return None
        words = tuple(kind.name.split("/"))
        itself = words in self._by_words  # does that, too
        if kind.sizes in known:
            return known[kind.sizes] + (0.0 if itself else besides)
        between = _between_depths(known, kind.sizes)
        if itself and between is not None and not set(LONGER).isdisjoint(words):
            return between
        distances = {sizes: _distance(sizes, kind.sizes) for sizes in known}
        near = sorted(distances, key=distances.__getitem__)[:NEAREST]
        weights = [1 / distances[sizes] for sizes in near]
        num_sms = self.file.num_sms
        per_result = besides / math.prod(kind.sizes[:2]) if itself else 0.0
        per_flop = [
            _product_alone(known[sizes], per_result * math.prod(sizes[:2]))
            / (2 * math.prod(sizes) + half_wave(sizes[2], num_sms))
            for sizes in near
        ]
        mean = sum(map(float.__mul__, weights, per_flop)) / sum(weights)
        memory = 0.0 if self.bandwidth is None else device_bytes / self.bandwidth
        alone = max((flops + half_wave(kind.sizes[2], num_sms)) * mean, memory, self._least)
        return alone + besides

    def _moves(self, kind: Kind, device_bytes: int) -> float | None:
        """On the line between the two sizes around it; a launch of nothing takes the least time."""
        known = self._like(kind)
        if not known:
            if self.bandwidth is None:
                return None
            return self._least + device_bytes / self.bandwidth
        sizes = sorted(size for (size,) in known)
        place = bisect_left(sizes, device_bytes)
        if place == len(sizes):
            return known[(sizes[-1],)] * device_bytes / sizes[-1]
        right = known[(sizes[place],)]
        start, left = (sizes[place - 1], known[(sizes[place - 1],)]) if place else (0, self._least)
        return left + (right - left) * (device_bytes - start) / (sizes[place] - start)


@functools.lru_cache(maxsize=16)
def measured(file: CardFile) -> Measured:
    """The one of a file."""
    return Measured(file)


def half_wave(depth: int, num_sms: int) -> int:
    """FLOPs that half of the multiprocessors could do in a product's last wave of tiles."""
    return TILE * min(depth, TILE_DEPTH) * num_sms


def _product_alone(seconds: float, besides: float) -> float:
    """The seconds of the product alone; what it does besides is hidden where it would be more than
    half."""
    return max(seconds - besides, seconds / 2)


def _between_depths(known: Known, sizes: tuple[int, ...]) -> float | None:
    """By the time for an element of the result, on the line between depths, whose nearest sizes
    count; None where it is deeper than all, or less deep."""
    depth = sizes[2]
    near: dict[int, tuple[int, ...]] = {}
    for other in sorted(known, key=lambda other: _distance(other[:2], sizes[:2]), reverse=True):
        near[other[2]] = other
    less = max((d for d in near if d <= depth), default=None)
    more = min((d for d in near if d >= depth), default=None)
    if less is None or more is None:
        return None
    left, right = (known[near[d]] / math.prod(near[d][:2]) for d in (less, more))
    share = (depth - less) / (more - less) if more > less else 0.0
    return (left + share * (right - left)) * math.prod(sizes[:2])


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Squared, of logarithms: twice as large is as far as half as large."""
    return sum(math.log2(max(a, 1) / max(b, 1)) ** 2 for a, b in zip(one, other, strict=True))


def _bandwidth(moves: list[Points]) -> float | None:
    """Bytes per second of a typical kernel that memory limits; None if there is no large one."""
    large = [sizes[0] / t for points in moves for sizes, t in points if sizes[0] >= LARGE]
    return statistics.median(large) if large else None
