"""How long transfers take by what was measured on a machine: its buses, and its exchanges."""

from __future__ import annotations

from bisect import bisect_left

from llmq.options.card_file import CardFile, Points
from llmq.plan.replay import Transfers
from llmq.runtime.plan_device import Work

_WITHOUT_ACCESS = {True: "nccl-off", False: "staged"}  # backends, by whether NCCL exchanges


class RigLinks:
    """The carriers of the data of so many of a machine's GPUs, which all do the same at once."""

    def __init__(
        self, file: CardFile, gpus: int, *, nccl: bool, peer_access: bool, at_once: bool = False
    ):
        """nccl: whether it exchanges. peer_access: whether GPUs may reach each other's memory.

        at_once: exchanges take no time, whatever was measured.
        """
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
    """The time of a collective by which a GPU receives so many bytes; points: as measured.

    On the line between two sizes; a smaller one takes the smallest one's time: that of its parts.
    """
    times = sorted((sizes[0], seconds) for sizes, seconds in points)
    place = bisect_left(times, (received, 0.0))
    if place == len(times):
        return times[-1][1] * received / times[-1][0]
    if place == 0:
        return times[0][1]
    (start, left), (end, right) = times[place - 1 : place + 1]
    return left + (right - left) * (received - start) / (end - start)
