"""Times of launches, transfers and exchanges from a card file: interpolated between measured sizes,
or taken from similar kinds."""

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

NEAREST = 4  # measured products that predict another size
TILE = 128 * 256  # elements of a product's tile on a multiprocessor
TILE_DEPTH = 2048  # longer sums are split among multiprocessors
LARGE = 16 << 20  # least bytes of a launch at the memory's rate
# Time that our fused products spend on the bytes beside their matrices, relative to a kernel that
# only moves these bytes. The second factor is for codes in both layouts, which need more
# computation. Both are about the means of h100_gemm_swiglu.md, whose rows have 0.6 to 1.8 and, with
# codes in both layouts, 1.1 to 1.7.
EXPOSED, EXPOSED_TRANSPOSED = 0.9, 1.5

Known = dict[tuple[int, ...], float]
"""Median seconds by sizes."""


class More(NamedTuple):
    """Work of a launch beyond the library's product of the same matrices. nbytes: extra bytes.
    transposes: True if the launch writes codes in both layouts."""

    nbytes: int = 0
    transposes: bool = False

    @classmethod
    def of(cls, cost: Cost, device_bytes: int) -> More:
        """Return the extra work; NOTHING for launches that are no fused product, or hide the extra
        work."""
        if cost.matrices is None:
            return NOTHING
        return cls(max(device_bytes - cost.matrices, 0), cost.transposes)


NOTHING = More()


def exposed(more: More) -> float:
    """Bytes whose transfer alone takes as long as a fused product's extra work."""
    return (EXPOSED_TRANSPOSED if more.transposes else EXPOSED) * more.nbytes


class Measured:
    """Measured launches of a card file. Methods return None for a launch unlike all measured ones;
    then the data sheet gives its time."""

    def __init__(self, file: CardFile):
        self.file = file
        self._by_words: defaultdict[tuple[str, ...], Known] = defaultdict(dict)
        merged: defaultdict[tuple[str, ...], defaultdict[tuple[int, ...], list[float]]]
        merged = defaultdict(lambda: defaultdict(list))
        for name, points in file.launches.items():
            words = tuple(name.split("/"))
            # A fused product's time includes extra work, so it predicts no other kind.
            longer = not set(LONGER).isdisjoint(words)
            for count in range(len(words) if longer else 1, len(words) + 1):
                for sizes, seconds in points:
                    merged[words[:count]][tuple(sizes)].append(seconds)
        for words, by_sizes in merged.items():
            self._by_words[words] = {s: statistics.median(times) for s, times in by_sizes.items()}
        for name, points in file.launches.items():  # an exact kind replaces medians of similar ones
            self._by_words[tuple(name.split("/"))] |= {tuple(s): times for s, times in points}
        moves = [p for name, p in file.launches.items() if len(p[0][0]) == 1]
        self._least = min((t for points in moves for _, t in points), default=0.0)
        self.bandwidth = _bandwidth(moves)
        self._seconds: dict[tuple[Kind, More], float | None] = {}

    def seconds(
        self, kind: Kind, flops: int, device_bytes: int, more: More = NOTHING
    ) -> float | None:
        """Seconds of one launch that is no attention; None if unknown. more: work that similar
        launches lack, which takes extra time."""
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
        """Sizes and seconds of the measurement nearest in size, of this kind or a similar one; None
        if there is none. For attention, measurements of equal length, head size and window come
        first: the number of heads does not change a kernel's work per head."""
        known = self._like(kind)
        if not known:
            return None
        known = {s: t for s, t in known.items() if s[1:] == kind.sizes[1:]} or known
        sizes = min(known, key=lambda sizes: _distance(sizes, kind.sizes))
        return sizes, known[sizes]

    def _like(self, kind: Kind) -> Known:
        """Measurements of the kinds that share the most leading words with `kind`, with equally
        many sizes."""
        words = tuple(kind.name.split("/"))
        counts = range(len(words), 0, -1)
        like = next((self._by_words[words[:n]] for n in counts if words[:n] in self._by_words), {})
        return {sizes: times for sizes, times in like.items() if len(sizes) == len(kind.sizes)}

    def _product(self, kind: Kind, flops: int, device_bytes: int, besides: float) -> float | None:
        """Seconds of a product: as measured at its size, else at the mean rate of the nearest
        sizes, weighted by nearness. A kind with a word of LONGER is interpolated between two
        measured depths. Half a wave of tiles, the mean idle part of the last wave, counts as work.
        besides: seconds of extra work, in proportion to the result."""
        known = self._like(kind)
        if not known:
            return None
        words = tuple(kind.name.split("/"))
        itself = words in self._by_words  # this kind was measured, with its extra work
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
        """Seconds of a memory-bound launch, interpolated between the next smaller and larger
        measured size. A launch without bytes takes the least measured time."""
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
    """The Measured of a file, cached."""
    return Measured(file)


def half_wave(depth: int, num_sms: int) -> int:
    """FLOPs of half the multiprocessors in a product's last wave of tiles."""
    return TILE * min(depth, TILE_DEPTH) * num_sms


def _product_alone(seconds: float, besides: float) -> float:
    """Seconds of a product without its extra work, but at least half of `seconds`: the product
    hides any more extra work."""
    return max(seconds - besides, seconds / 2)


def _between_depths(known: Known, sizes: tuple[int, ...]) -> float | None:
    """Seconds of a product, interpolated between two measured depths in seconds per element of the
    result. The measurement nearest in size stands for its depth. None beyond the measured
    depths."""
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
    """Squared distance of log2 sizes: twice as large is as far as half as large."""
    return sum(math.log2(max(a, 1) / max(b, 1)) ** 2 for a, b in zip(one, other, strict=True))


def _bandwidth(moves: list[Points]) -> float | None:
    """Bytes per second of a typical memory-bound kernel; None if no large kernel was measured."""
    large = [sizes[0] / t for points in moves for sizes, t in points if sizes[0] >= LARGE]
    return statistics.median(large) if large else None


_WITHOUT_ACCESS = {True: "nccl-off", False: "staged"}  # backends; key: True with NCCL


class RigLinks:
    """Measured carriers of data between `gpus` GPUs of a machine that all do the same at once."""

    def __init__(
        self, file: CardFile, gpus: int, *, nccl: bool, peer_access: bool, at_once: bool = False
    ):
        """nccl: True if NCCL exchanges. peer_access: True if GPUs may access each other's memory.
        at_once: True if exchanges take no time, whatever was measured."""
        number = str(gpus)
        backend = ("nccl" if nccl else "copies") if peer_access else _WITHOUT_ACCESS[nccl]
        self._bus = file.bus.get(number)
        self._exchange = file.exchange.get(number, {}).get(backend, {})
        self._beside_bus, self._at_once = file.beside_bus and peer_access, at_once
        # Factor on the time of products beside an exchange; None if not measured.
        beside = file.beside.get(number, {}).get(backend)
        self.slowdown = None if at_once or beside is None else max(beside, 1.0)

    @property
    def both_ways(self) -> tuple[float, float] | None:
        """The factors of Rates.both_ways; None if this number of GPUs was not measured."""
        if self._bus is None:
            return None
        into, out, both = self._bus
        return max(into / both, 1.0), max(out / both, 1.0)

    @property
    def beside_exchanges(self) -> tuple[float, float]:
        """The factors of Rates.beside_exchanges, from loads measured beside exchanges, else from
        plain copies in both directions. Without measured exchanges both are 1, because the data
        sheet then gives the time of exchanges."""
        if self._bus is None or not self._exchange:
            return 1.0, 1.0
        into, out = self.both_ways
        for (nbytes,), seconds in self._exchange.get("load", ()):
            into = seconds * 1e9 * self._bus[0] / nbytes
        return into, out

    def carried(self, work: Work) -> Transfers | None:
        """The transfers of Rates.transfers, without a network; None if this number of GPUs was not
        measured."""
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
        # Another GPU sends the received bytes at the same time.
        return Transfers.of(load, store, (exchange, exchange))


def exchange_seconds(points: Points, received: int) -> float:
    """Seconds of a collective in which a GPU receives `received` bytes, on the line between two
    measured sizes. Smaller sizes take as long as the smallest measured size, whose time is
    latency."""
    times = sorted((sizes[0], seconds) for sizes, seconds in points)
    place = bisect_left(times, (received, 0.0))
    if place == len(times):
        return times[-1][1] * received / times[-1][0]
    if place == 0:
        return times[0][1]
    (start, left), (end, right) = times[place - 1 : place + 1]
    return left + (right - left) * (received - start) / (end - start)
