"""A trace of the plan device, replayed at a card's rates.

Work on one stream runs in order. Streams run beside each other, held back by the events between
them and by what carries one transfer at a time: the bus in each direction, the link to peers, and
each GPU's share of the host's memory.
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
    """Seconds that a piece of work needs of each carrier, without those that it does not need.
    carriers: the bus towards the card ("load") and away from it ("store"), "link", "host" for host
    memory, "network". load, store: what of these two is slower while the bus carries something the
    other way, too. exchange: whether GPUs exchange over the bus, by both ways at once."""

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
    """The rates that a replay asks of a card (llmq.plan.cost has them)."""

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
    """Run a trace from an idle machine until all of its streams are done. Kernels of the main
    stream wait while one of another stream runs, whose blocks come first. A transfer over the bus
    is slower while the bus is busy the other way, too: how long that is, a first run says
    (`_longer`), and a second one has the transfers take that much longer."""
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
"""A phase: the contents of a trace, its seconds on the GPU itself, and those of the carriers if it
needs any."""


def _timed(item: Work | Mark, rates: Rates) -> _Timed:
    if not isinstance(item, Work):
        return item, 0.0, None
    # Most move nothing, and to find that out takes time.
    moves = item.loaded or item.stored or item.received or item.shared or item.network
    return item, rates.compute(item), rates.transfers(item) if moves else None


class _Moved(NamedTuple):
    """A piece of work that needed carriers: its place in the trace, and when it could have started,
    did so, and had left them all."""

    place: int
    needs: Transfers
    ready: float
    start: float
    end: float


def _longer(moved: list[_Moved], phase: Phase, rates: Rates) -> dict[int, Transfers]:
    """The times of transfers that are slower than alone, by their places. Each direction of the bus
    is slower in that part of the phase in which the other one is busy, and all of its transfers by
    the same factor. Where a transfer and an exchange through the host waited for each other, they
    really share the bus: for so long the transfer has the other direction busy, too."""
    exchanges = [span for span in moved if span.needs.exchange]  # one after the other
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
    """The exchanges that this transfer waited for, or that waited for it."""
    first = bisect_right(exchanges, transfer.ready, key=lambda exchange: exchange.end)
    for exchange in exchanges[first:]:
        if exchange.ready >= transfer.end:
            return
        yield exchange


def _shared(transfer: _Moved, exchange: _Moved, times: float) -> float:
    """The seconds of the transfer alone that go beside the exchange, where it takes so many times
    as long: while it waited it would have got on by a part of that time."""
    waited = _overlap(transfer.ready, transfer.start, exchange.start, exchange.end)
    held_up = _overlap(transfer.start, transfer.end, exchange.ready, exchange.start)
    return waited / times + min(held_up, (exchange.end - exchange.start) / times)


def _overlap(start: float, end: float, other_start: float, other_end: float) -> float:
    return max(min(end, other_end) - max(start, other_start), 0.0)


class _Carriers:
    """Carriers, each with one transfer at a time. moved: what did. load, store: seconds of the bus,
    as Phase has them."""

    def __init__(self) -> None:
        self._free: defaultdict[str, float] = defaultdict(float)
        self.moved: list[_Moved] = []
        self.load = self.store = 0.0

    def carry(self, place: int, needs: Transfers, ready: float) -> tuple[float, float]:
        """When it starts, and for how long its longest carrier is busy."""
        self.load, self.store = self.load + needs.load, self.store + needs.store
        start = max([ready, *(self._free[name] for name in needs.carriers)])
        for name, duration in needs.carriers.items():
            self._free[name] = start + duration
        longest = max(needs.carriers.values(), default=0.0)
        self.moved.append(_Moved(place, needs, ready, start, start + longest))
        return start, longest


def _replay(timed: list[_Timed], slowdown: float) -> tuple[Phase, list[_Moved]]:
    """slowdown: as Rates has it."""
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
            # Exchanges take memory's rate and multiprocessors from it.
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
    """When other streams did something that kernels of the main stream may have beside them; these
    ask in order of time."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []

    def note(self, start: float, end: float) -> None:
        """Note the time of something that was enqueued."""
        self._times.append((start, end))

    def beside(self, start: float, seconds: float) -> float:
        """How long something goes on in the time of a kernel that takes so long."""
        self._forget(start)
        return min(sum(_overlap(start, start + seconds, s, e) for s, e in self._times), seconds)

    def wait(self, start: float, seconds: float) -> float:
        """How much later a kernel ends where these are kernels, too. They have the multiprocessors,
        or wait there for the bus. Their blocks, more than fit at once, come before those of all
        that is enqueued later: a launch waits for a whole kernel."""
        self._forget(start)
        now, end = start, start + seconds  # now: until when others are taken into account
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
