"""Replay of the plan device's trace at a card's rates.

Work on one stream runs in order. Streams run concurrently, held back by the events between them and
by carriers of one transfer at a time: the bus in each direction, the link to peers, and each GPU's
share of host memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llmq.runtime.device import Event
from llmq.runtime.plan_device import Mark, Trace, Work


class Transfers(NamedTuple):
    """Seconds that a piece of work keeps each carrier busy; unused carriers are left out. carriers:
    the bus to the card ("load") and from it ("store"), "link", "host" (host memory), "network",
    "disk". load, store: the part of the seconds of "load" and "store" that grows while the bus
    carries data in the other direction. exchange: True if GPUs exchange over the bus, both ways at
    once."""

    carriers: dict[str, float]
    load: float = 0.0
    store: float = 0.0
    exchange: bool = False

    @classmethod
    def of(
        cls, load: float, store: float, exchange: tuple[float, float], **others: float
    ) -> Transfers:
        """exchange: seconds of an exchange on the bus to the card and from it, at the rate while
        both directions are busy."""
        into, out = exchange
        carriers = {"load": load + into, "store": store + out} | others
        needed = {name: seconds for name, seconds in carriers.items() if seconds}
        return cls(needed, load, store, into > 0 or out > 0)


class Rates(Protocol):
    """Rates of a card that a replay needs; llmq.plan.cost implements them."""

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
    """One replayed trace, in seconds. busy: of the main stream by part. wall: until all streams are
    done. load, store: seconds of the bus, as in Transfers."""

    busy: dict[str, float]
    wall: float
    load: float
    store: float


def replay(trace: Trace, rates: Rates) -> Phase:
    """Replay a trace on an idle machine until all its streams are done. Kernels of the main stream
    wait while a kernel of another stream runs, whose blocks come first. Transfers over the bus are
    slower while the bus is busy the other way: a first run measures this overlap (`_longer`), and a
    second run lengthens the transfers."""
    timed = [_timed(item, rates) for item in trace]
    phase, moved = _replay(timed, rates.slowdown)
    longer = _longer(moved, phase, rates)
    if not longer:
        return phase
    again = [
        (item, seconds, longer.get(place, needs))
        for place, (item, seconds, needs) in enumerate(timed)
    ]
    return _replay(again, rates.slowdown)[0]


_Timed = tuple[Work | Mark, float, Transfers | None]
"""An item of a trace, its seconds on the GPU itself, and the seconds of carriers if it uses any."""


def _timed(item: Work | Mark, rates: Rates) -> _Timed:
    if not isinstance(item, Work):
        return item, 0.0, None
    # Most items move nothing, and calculating that takes time.
    moves = item.loaded or item.stored or item.received or item.shared or item.network
    return item, rates.compute(item), rates.transfers(item) if moves else None


class _Moved(NamedTuple):
    """A piece of work with transfers: its index in the trace, and the times when it could start,
    started, and left all carriers."""

    place: int
    needs: Transfers
    ready: float
    start: float
    end: float


def _longer(moved: list[_Moved], phase: Phase, rates: Rates) -> dict[int, Transfers]:
    """Lengthened transfers by index in the trace. Each direction of the bus slows all its transfers
    by one factor, for the share of the phase in which the other direction is busy. A transfer and
    an exchange through the host that waited for each other really share the bus: during this wait
    the transfer meets traffic of the other direction."""
    exchanges = [span for span in moved if span.needs.exchange]  # exchanges run one after the other
    if not exchanges and not (phase.load and phase.store):
        return {}
    more_load, more_store = (
        (times - 1) * min(other / phase.wall, 1.0)
        for times, other in zip(rates.both_ways, (phase.store, phase.load), strict=True)
    )
    times_load, times_store = rates.beside_exchanges
    found = {}
    for span in moved:
        needs = span.needs
        if not (needs.load or needs.store):
            continue
        carriers = dict(needs.carriers)
        beside = [] if needs.exchange else list(_beside(span, exchanges))
        for name, alone, more, times in (
            ("load", needs.load, more_load, times_load),
            ("store", needs.store, more_store, times_store),
        ):
            if alone:
                shared = sum(_shared(span, exchange, times) for exchange in beside)
                carriers[name] += alone * more + min(shared, alone) * (times - 1)
        if carriers != needs.carriers:
            found[span.place] = needs._replace(carriers=carriers)
    return found


def _beside(transfer: _Moved, exchanges: list[_Moved]) -> Iterator[_Moved]:
    """Yield the exchanges that this transfer waited for, or that waited for it."""
    first = bisect_right(exchanges, transfer.ready, key=lambda exchange: exchange.end)
    for exchange in exchanges[first:]:
        if exchange.ready >= transfer.end:
            return
        yield exchange


def _shared(transfer: _Moved, exchange: _Moved, times: float) -> float:
    """Seconds of a transfer, at its own speed, that fall beside an exchange; beside it the transfer
    takes `times` as long. A transfer that waited would have made progress meanwhile."""
    waited = _overlap(transfer.ready, transfer.start, exchange.start, exchange.end)
    held_up = _overlap(transfer.start, transfer.end, exchange.ready, exchange.start)
    return waited / times + min(held_up, (exchange.end - exchange.start) / times)


def _overlap(start: float, end: float, other_start: float, other_end: float) -> float:
    return max(min(end, other_end) - max(start, other_start), 0.0)


class _Carriers:
    """Carriers, each with one transfer at a time. moved: finished pieces of work. load, store:
    seconds of the bus, as in Phase."""

    def __init__(self) -> None:
        self._free: defaultdict[str, float] = defaultdict(float)
        self.moved: list[_Moved] = []
        self.load = self.store = 0.0

    def carry(self, place: int, needs: Transfers, ready: float) -> tuple[float, float]:
        """Return the start of a piece, and the seconds of its busiest carrier."""
        self.load, self.store = self.load + needs.load, self.store + needs.store
        start = max([ready, *(self._free[name] for name in needs.carriers)])
        for name, duration in needs.carriers.items():
            self._free[name] = start + duration
        longest = max(needs.carriers.values(), default=0.0)
        self.moved.append(_Moved(place, needs, ready, start, start + longest))
        return start, longest


def _replay(timed: list[_Timed], slowdown: float) -> tuple[Phase, list[_Moved]]:
    """Replay once. slowdown: as in Rates."""
    streams: defaultdict[str, float] = defaultdict(float)
    recorded: dict[Event, float] = {}
    busy: defaultdict[str, float] = defaultdict(float)
    exchanges, kernels, carriers = _GoingOn(), _GoingOn(), _Carriers()
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
            # Exchanges take memory bandwidth and multiprocessors from the kernel.
            seconds += (slowdown - 1) * exchanges.beside(start, seconds)
            seconds += kernels.wait(start, seconds)
        lasts = seconds
        if needs is not None:
            start, carried = carriers.carry(place, needs, start)
            lasts = max(seconds, carried)
            if item.received and slowdown > 1:
                exchanges.note(start, start + lasts)
        if stream != "main" and item.file:
            kernels.note(start, start + (lasts if item.loaded or item.stored else seconds))
        streams[stream] = start + lasts
        if stream == "main":
            busy[_part(item)] += seconds
    wall = max(streams.values(), default=0.0)
    phase = Phase(busy=dict(busy), wall=wall, load=carriers.load, store=carriers.store)
    return phase, carriers.moved


class _GoingOn:
    """Intervals of work on other streams beside the main stream's kernels, which ask in order of
    time."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []

    def note(self, start: float, end: float) -> None:
        """Add the interval of a piece of work."""
        self._times.append((start, end))

    def beside(self, start: float, seconds: float) -> float:
        """Seconds in which other streams' kernels run beside a kernel of this start and length."""
        self._forget(start)
        return min(sum(_overlap(start, start + seconds, s, e) for s, e in self._times), seconds)

    def wait(self, start: float, seconds: float) -> float:
        """Seconds by which other streams' kernels delay a kernel. These kernels have more blocks
        than fit at once. Their blocks occupy the multiprocessors, or wait there for the bus, and
        come before blocks of later launches: so a later launch waits for a whole kernel."""
        self._forget(start)
        now, end = start, start + seconds  # now: end of the intervals so far
        for s, e in sorted(self._times):
            now = max(now, s)
            if now < min(e, end):
                now, end = e, end + e - now
        return end - start - seconds

    def _forget(self, before: float) -> None:
        self._times = [(s, e) for s, e in self._times if e > before]


def _part(work: Work) -> str:
    if work.cost.part == "product":
        return "head" if work.part == "head" else "blocks"
    return work.cost.part
