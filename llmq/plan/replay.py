"""A trace of the plan device, replayed at a card's rates.

Work on one stream runs in order. Streams run beside each other, held back by the events between
them and by what carries one transfer at a time: the bus in each direction, the link to peers, and
each GPU's share of the host's memory.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llmq.runtime.device import Event
from llmq.runtime.launch_kind import PRODUCTS
from llmq.runtime.plan_device import Mark, Trace, Work


class Transfers(NamedTuple):
    """Seconds that a piece of work needs of each carrier, without those that it does not need.

    carriers: the bus towards the card ("load") and away from it ("store"), "link", "host" for host
    memory, "network". load, store: what of these two is slower while the bus carries something the
    other way, too.
    """

    carriers: dict[str, float]
    load: float = 0.0
    store: float = 0.0

    @classmethod
    def of(
        cls, load: float, store: float, exchange: tuple[float, float], **others: float
    ) -> Transfers:
        """exchange: of the bus, each way, at a rate that both ways have at once."""
        into, out = exchange
        carriers = {"load": load + into, "store": store + out} | others
        return cls({name: seconds for name, seconds in carriers.items() if seconds}, load, store)


class Rates(Protocol):
    """What a replay asks of a card, as llmq.plan.cost has it."""

    @property
    def slowdown(self) -> float: ...

    @property
    def both_ways(self) -> tuple[float, float]: ...

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
    as a first run says, and all of its transfers by the same factor.
    """
    timed = [_timed(item, rates) for item in trace]
    phase = _replay(timed, rates.slowdown, (1.0, 1.0))
    if not phase.load or not phase.store:
        return phase
    others = (phase.store, phase.load)
    slower = [
        1 + (times - 1) * min(other / phase.wall, 1.0)
        for times, other in zip(rates.both_ways, others, strict=True)
    ]
    return _replay(timed, rates.slowdown, tuple(slower))


_Timed = tuple[Work | Mark, float, Transfers | None]
"""What is in a trace, its seconds on the GPU itself, and those of the carriers if it needs any."""


def _timed(item: Work | Mark, rates: Rates) -> _Timed:
    if not isinstance(item, Work):
        return item, 0.0, None
    # Most move nothing, and to find that out takes time.
    moves = item.loaded or item.stored or item.received or item.shared or item.network
    return item, rates.compute(item), rates.transfers(item) if moves else None


def _replay(timed: list[_Timed], slowdown: float, slower: tuple[float, float]) -> Phase:
    """slowdown: as Rates has it. slower: how many times as long each direction of the bus takes."""
    streams: defaultdict[str, float] = defaultdict(float)
    carriers: defaultdict[str, float] = defaultdict(float)
    recorded: dict[Event, float] = {}
    busy: defaultdict[str, float] = defaultdict(float)
    exchanges, holding = _Beside(slowdown), _Holding()
    load = store = 0.0
    more_load, more_store = (times - 1 for times in slower)
    for item, seconds, needs in timed:
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
            load, store = load + needs.load, store + needs.store
            for name in needs.carriers:
                start = max(start, carriers[name])
            for name, duration in needs.carriers.items():
                if name == "load":
                    duration += more_load * needs.load
                elif name == "store":
                    duration += more_store * needs.store
                carriers[name] = start + duration
                lasts = max(lasts, duration)
            if item.received:
                exchanges.note(start, start + lasts)
        if stream != "main" and item.file:
            holding.note(start, start + (lasts if item.loaded or item.stored else seconds))
        streams[stream] = start + lasts
        if stream == "main":
            busy[_part(item)] += seconds
    wall = max(streams.values(), default=0.0)
    return Phase(busy=dict(busy), wall=wall, load=load, store=store)


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
