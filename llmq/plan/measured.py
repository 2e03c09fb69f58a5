"""How long launches and transfers take by what was measured on a machine: between its sizes and
for its like, over its buses, and in exchanges.
"""

from __future__ import annotations

import functools
import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

from llmq.options.card_file import CardFile, Points
from llmq.plan.replay import Transfers
from llmq.runtime.cost import LONGER, Cost, Kind
from llmq.runtime.plan_device import Work

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
        """Sizes and seconds of the launch of this kind, or its like, that is nearest in size. The
        nearest measurement of attention: of those with its length, head size and window, if there
        is any. They differ in the number of heads alone, which does not change what the kernel
        does."""
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
        one of LONGER by its depth, between two others. The last wave of tiles, half empty as it is
        on average, counts as work. besides: seconds that it takes for what a product does not do,
        which is by the size of the result."""
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


_WITHOUT_ACCESS = {True: "nccl-off", False: "staged"}  # backends, by whether NCCL exchanges


class RigLinks:
    """The carriers of the data of so many of a machine's GPUs, which all do the same at once."""

    def __init__(
        self, file: CardFile, gpus: int, *, nccl: bool, peer_access: bool, at_once: bool = False
    ):
        """nccl: whether it exchanges. peer_access: whether GPUs may reach each other's memory.
        at_once: exchanges take no time, whatever was measured."""
        number = str(gpus)
        backend = ("nccl" if nccl else "copies") if peer_access else _WITHOUT_ACCESS[nccl]
        self._bus = file.bus.get(number)
        self._exchange = file.exchange.get(number, {}).get(backend, {})
        self._beside_bus, self._at_once = file.beside_bus and peer_access, at_once
        # How many times as long products take that run beside an exchange.
        beside = file.beside.get(number, {}).get(backend, 1.0)
        self.slowdown = 1.0 if at_once else max(beside, 1.0)

    @property
    def both_ways(self) -> tuple[float, float] | None:
        """The factor that Rates.both_ways has; None where so many GPUs were not measured."""
        if self._bus is None:
            return None
        into, out, both = self._bus
        return max(into / both, 1.0), max(out / both, 1.0)

    @property
    def beside_exchanges(self) -> tuple[float, float]:
        """The factor that Rates has: what loads add to exchanges where that was measured, else as
        beside plain copies the other way. 1 where exchanges are the data sheet's, because none was
        measured."""
        if self._bus is None or not self._exchange:
            return 1.0, 1.0
        into, out = self.both_ways
        for (nbytes,), seconds in self._exchange.get("load", ()):
            into = seconds * 1e9 * self._bus[0] / nbytes
        return into, out

    def carried(self, work: Work) -> Transfers | None:
        """The transfers that Rates.transfers has, without a network; None where so many GPUs were
        not measured."""
        received, loaded = 0 if self._at_once else work.received, work.loaded
        if self._beside_bus and "all_gather" in self._exchange:
            received += 0 if self._at_once else work.shared
        else:
            loaded += work.shared
        points = self._exchange.get(work.entry) or self._exchange.get("all_gather")
        if self._bus is None or (received and points is None):
            return None
        exchange = exchange_seconds(points, received) if received else 0.0
        into, out, _ = (1e9 * rate for rate in self._bus)
        load, store = loaded / into, work.stored / out
        if self._beside_bus:
            return Transfers.of(load, store, (0.0, 0.0), link=exchange)
        # Another GPU sends the bytes that one receives, at the same time.
        return Transfers.of(load, store, (exchange, exchange))


def exchange_seconds(points: Points, received: int) -> float:
    """The time of a collective by which a GPU receives so many bytes; points: as measured. On the
    line between two sizes; a smaller one takes the smallest one's time: that of its parts."""
    times = sorted((sizes[0], seconds) for sizes, seconds in points)
    place = bisect_left(times, (received, 0.0))
    if place == len(times):
        return times[-1][1] * received / times[-1][0]
    if place == 0:
        return times[0][1]
    (start, left), (end, right) = times[place - 1 : place + 1]
    return left + (right - left) * (received - start) / (end - start)
