"""A trace of the plan device, replayed at a card's rates.

Work on one stream runs in order. Streams run beside each other, held back by the events between
them and by what carries one transfer at a time: the bus in each direction, the link to peers, and
each GPU's share of the host's memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from llmq.runtime.device import Event
from llmq.runtime.launch_kind import PRODUCTS
from llmq.runtime.plan_device import Mark, Trace, Work


class Transfers(NamedTuple):
    """Seconds that a piece of work needs of each carrier, without those that it does not need.

    carriers: the bus towards the card ("load") and away from it ("store"), "link", "host" for host
    memory, "network". load, store: what of these two is slower while the bus carries something the
    other way, too. exchange: whether GPUs exchange over the bus, by both ways at once.
    """

    carriers: dict[str, float]
    load: float = 0.0
    store: float = 0.0
    exchange: bool = False

    @classmethod
    def of(
        cls, load: float, store: float, exchange: tuple[float, float], **others: float
    ) -> Transfers:
        """exchange: of the bus, each way, at a rate that both ways have at once."""
        into, out = exchange
        carriers = {"load": load + into, "store": store + out} | others
        needed = {name: seconds for name, seconds in carriers.items() if seconds}
        return cls(needed, load, store, into > 0 or out > 0)


class Rates(Protocol):
    """What a replay asks of a card, as llmq.plan.cost has it."""

    @property
    def slowdown(self) -> float: ...

    @property
    def both_ways(self) -> tuple[float, float]: ...

    @property
    def beside_exchanges(self) -> tuple[float, float]: ...

    def compute(self, work: Work) -> float: ...

    def transfers(self, work: Work) -> Transfers: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One replayed trace, in seconds. busy: of the main stream by part. wall: until all is done.
    load, store: of the bus, as Transfers has them."""

    busy: dict[str, float]
    wall: float
    load: float
    store: float


def replay(trace: Trace, rates: Rates) -> Phase:
    """Run a trace from an idle machine until all of its streams are done.

    Kernels of the main stream wait while one of another stream runs, whose blocks come first.
    Each direction of the bus is slower in that part of the phase in which the other one is busy,
    as a first run says, and all of its transfers by the same factor. Where a transfer and an
    exchange through the host waited for each other in that run, they really share the bus: so long
    the transfer has the other direction busy, too.
    """
    timed = [_timed(item, rates) for item in trace]
    phase, carried = _replay(timed, rates.slowdown, _Slower())
    beside = carried.beside_exchanges()
    if not beside and not (phase.load and phase.store):
        return phase
    others = (phase.store, phase.load)
    slower = _Slower(
        *(
            (times - 1) * min(other / phase.wall, 1.0)
            for times, other in zip(rates.both_ways, others, strict=True)
        ),
        *rates.beside_exchanges,
        beside,
    )
    return _replay(timed, rates.slowdown, slower)[0]


_Timed = tuple[Work | Mark, float, Transfers | None]
"""What is in a trace, its seconds on the GPU itself, and those of the carriers if it needs any."""


def _timed(item: Work | Mark, rates: Rates) -> _Timed:
    if not isinstance(item, Work):
        return item, 0.0, None
    # Most move nothing, and to find that out takes time.
    moves = item.loaded or item.stored or item.received or item.shared or item.network
    return item, rates.compute(item), rates.transfers(item) if moves else None


class _Shared(NamedTuple):
    """How long a transfer waited for an exchange that went on, and an exchange of so many seconds
    for the transfer, where in truth both go on.
    """

    before: float
    after: float
    lasts: float

    def seconds(self, times: float) -> float:
        """Of the transfer alone, what goes beside the exchange, where it takes so many times as
        long: while it waited it would have got on by a part of that time."""
        return self.before / times + min(self.after, self.lasts / times)


@dataclass(frozen=True, slots=True)
class _Slower:
    """How much longer transfers over the bus take than alone.

    more_load, more_store: of their time, in all of the phase. load, store: how many times as long,
    while GPUs exchange through the host. beside: by which exchanges, by the transfer's place.
    """

    more_load: float = 0.0
    more_store: float = 0.0
    load: float = 1.0
    store: float = 1.0
    beside: dict[int, list[_Shared]] = field(default_factory=dict)

    def seconds(self, place: int, needs: Transfers) -> dict[str, float]:
        """Of each carrier."""
        if not (needs.load or needs.store):
            return needs.carriers
        found, beside = dict(needs.carriers), self.beside.get(place, ())
        for name, alone, more, times in (
            ("load", needs.load, self.more_load, self.load),
            ("store", needs.store, self.more_store, self.store),
        ):
            if alone:
                slow = sum(shared.seconds(times) for shared in beside)
                found[name] += alone * more + min(slow, alone) * (times - 1)
        return found


class _Span(NamedTuple):
    """A transfer over the bus: its place in the trace, when it could start, did, and ended."""

    place: int
    ready: float
    start: float
    end: float


class _Carriers:
    """What carries one transfer at a time. load, store: seconds of the bus, as Phase has them."""

    def __init__(self, slower: _Slower):
        self._slower = slower
        self._free: defaultdict[str, float] = defaultdict(float)
        self._exchanges: list[_Span] = []
        self._one_way: list[_Span] = []
        self.load = self.store = 0.0

    def carry(self, place: int, needs: Transfers, ready: float) -> tuple[float, float]:
        """When it starts, and for how long its longest carrier is busy."""
        self.load, self.store = self.load + needs.load, self.store + needs.store
        seconds = self._slower.seconds(place, needs)
        start = max([ready, *(self._free[name] for name in seconds)])
        for name, duration in seconds.items():
            self._free[name] = start + duration
        longest = max(seconds.values(), default=0.0)
        if needs.exchange:
            self._exchanges.append(_Span(place, ready, start, start + longest))
        elif needs.load or needs.store:
            self._one_way.append(_Span(place, ready, start, start + longest))
        return start, longest

    def beside_exchanges(self) -> dict[int, list[_Shared]]:
        """Of transfers one way, by their places: the exchanges that shared the bus with them."""
        ends = [exchange.end for exchange in self._exchanges]  # one after the other
        found: defaultdict[int, list[_Shared]] = defaultdict(list)
        for place, ready, start, end in self._one_way:
            for exchange in self._exchanges[bisect_right(ends, ready) :]:
                if exchange.ready >= end:
                    break
                before = _overlap(ready, start, exchange.start, exchange.end)
                after = _overlap(start, end, exchange.ready, exchange.start)
                found[place].append(_Shared(before, after, exchange.end - exchange.start))
        return found


def _overlap(start: float, end: float, other_start: float, other_end: float) -> float:
    return max(min(end, other_end) - max(start, other_start), 0.0)


def _replay(timed: list[_Timed], slowdown: float, slower: _Slower) -> tuple[Phase, _Carriers]:
    """slowdown: as Rates has it."""
    streams: defaultdict[str, float] = defaultdict(float)
    recorded: dict[Event, float] = {}
    busy: defaultdict[str, float] = defaultdict(float)
    exchanges, holding = _Beside(slowdown), _Holding()
    carriers = _Carriers(slower)
    for place, (item, seconds, needs) in enumerate(timed):
        stream = item.stream
        if not isinstance(item, Work):
            if item.wait:
                streams[stream] = max(streams[stream], recorded.get(item.event, 0.0))
            else:
                recorded[item.event] = streams[stream]
            continue
        start = streams[stream]
        if stream == "main":
            seconds += exchanges.delay(start, seconds)
            seconds += holding.delay(start, seconds)
        lasts = seconds
        if needs is not None:
            start, carried = carriers.carry(place, needs, start)
            lasts = max(seconds, carried)
            if item.received:
                exchanges.note(start, start + lasts)
        if stream != "main" and item.file:
            holding.note(start, start + (lasts if item.loaded or item.stored else seconds))
        streams[stream] = start + lasts
        if stream == "main":
            busy[_part(item)] += seconds
    wall = max(streams.values(), default=0.0)
    return Phase(busy=dict(busy), wall=wall, load=carriers.load, store=carriers.store), carriers


class _Beside:
    """When exchanges of GPUs take memory's rate and multiprocessors from the kernels of the main
    stream."""

    def __init__(self, slowdown: float):
        """slowdown: how many times as long kernels take beside it."""
        self._more = slowdown - 1
        self._going_on: list[tuple[float, float]] = []

    def note(self, start: float, end: float) -> None:
        """One that was enqueued."""
        if self._more:
            self._going_on.append((start, end))

    def delay(self, start: float, seconds: float) -> float:
        """How much later a kernel ends that takes so long without them; ask in order of time."""
        self._going_on = [(s, e) for s, e in self._going_on if e > start]
        overlap = sum(max(min(e, start + seconds) - max(s, start), 0) for s, e in self._going_on)
        return self._more * min(overlap, seconds)


class _Holding:
    """When a kernel of another stream has the multiprocessors, or waits there for the bus.

    Its blocks, more than fit at once, come before those of all that is enqueued later: a launch of
    the main stream waits for the whole kernel.
    """

    def __init__(self) -> None:
        self._going_on: list[tuple[float, float]] = []

    def note(self, start: float, end: float) -> None:
        """One that was enqueued."""
        self._going_on.append((start, end))

    def delay(self, start: float, seconds: float) -> float:
        """How much later a kernel of the main stream ends; ask in order of time."""
        self._going_on = [(s, e) for s, e in self._going_on if e > start]
        now, end = start, start + seconds  # now: until when others are taken into account
        for s, e in sorted(self._going_on):
            now = max(now, s)
            if now < min(e, end):
                now, end = e, end + e - now
        return end - start - seconds


def _part(work: Work) -> str:
    if work.file in PRODUCTS:
        return "head" if work.part == "head" else "blocks"
    return "attention" if work.file.startswith("attention") else "memory_bound"
