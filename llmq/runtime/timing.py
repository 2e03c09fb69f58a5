"""Measure times on a device: between marks in a stream, and of each launch of a function."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmq.base.tensor import Tensor
from llmq.runtime.cost import MOVES, Cost, Kind
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel

CALIBRATIONS = 33  # number of empty spans, whose median is the cost of the measurement


class Marks:
    """Points in a device's current stream, between which time is measured. A mark is an event on a
    GPU, and a reading of the clock on the CPU."""

    def __init__(self, dev: Device):
        self._dev = dev
        self._api = dev.api if dev.kind == "cuda" else None
        self._marks: list[Any] = []

    def mark(self) -> int:
        """Mark the current end of the current stream; return the mark's index."""
        if self._api is None:
            self._marks.append(time.perf_counter())
        else:
            event = self._api.eventCreate()
            self._api.eventRecord(event, self._dev.stream)
            self._marks.append(event)
        return len(self._marks) - 1

    def milliseconds(self, first: int, second: int) -> float:
        """Return the time between two marks that the device has already passed; call `synchronize`
        first."""
        first, second = self._marks[first], self._marks[second]
        if self._api is None:
            return (second - first) * 1e3
        return self._api.eventElapsedTime(first, second)

    def close(self) -> None:
        if self._api is not None:
            for event in self._marks:
                self._api.eventDestroy(event)
        self._marks.clear()


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """The time of one launch, copy or fill. traffic: bytes that the launch must move, as its kernel
    declares. main: True if the launch ran on the main stream. kind: see runtime.cost; None if the
    launch also reads or writes host memory."""

    name: str
    ms: float
    traffic: int
    flops: int
    main: bool
    kind: Kind | None = None


@contextmanager
def time_ranges(dev: Device) -> Iterator[list[tuple[str, float]]]:
    """Time every `dev.range` in the block; after the block the list holds (name, milliseconds).
    Within the block graphs are off; the end of the block waits for the device."""
    marks, spans, times = Marks(dev), [], []

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        first = marks.mark()
        yield
        spans.append((name, first, marks.mark()))

    with dev.without_graphs():
        try:
            with dev.instead(range=timed):
                yield times
        finally:
            dev.synchronize()
            times += [(name, marks.milliseconds(a, b)) for name, a, b in spans]
            marks.close()


def time_launches(dev: Device, fn: Callable[[], Any], *, in_turn: bool = False) -> list[LaunchTime]:
    """Run fn without graphs and time each of its launches, copies and fills; the call waits for the
    device. in_turn: True to run all work on the main stream in the order of the calls, so that no
    event waits. Without in_turn, the time of a launch includes its waits for launches on other
    streams. The time that two marks themselves take is subtracted from each result. The host must
    stay ahead of the device, so give the device some milliseconds of work first. If the device runs
    out of work, the gaps count as time of launches."""
    marks = Marks(dev)
    spans: list[tuple[Callable[[], tuple], bool, int, int]] = []

    def timed(call: Callable[..., None], describe: Callable[..., tuple]) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            main, first = dev.stream_name == "main", marks.mark()
            call(*args, **options)
            second = marks.mark()
            # Making a description takes longer than a small launch, so descriptions are made after
            # the run.
            spans.append((partial(describe, *args, **options), main, first, second))

        return run

    streams = {"on": lambda _: nullcontext()} if in_turn else {}
    with dev.without_graphs():
        with dev.instead(
            launch=timed(dev.launch, _launched),
            copy=timed(dev.copy, lambda dst, src: _moved("copy", dst, src)),
            zero=timed(dev.zero, lambda tensor: _moved("zero", tensor)),
            **streams,
        ):
            fn()
        empty = [marks.mark() for _ in range(CALIBRATIONS)]
        dev.synchronize()
    empty_ms = statistics.median(marks.milliseconds(*pair) for pair in itertools.pairwise(empty))
    times = [
        LaunchTime(name, max(marks.milliseconds(*pair) - empty_ms, 0.0), traffic, flops, main, kind)
        for describe, main, *pair in spans
        for name, traffic, flops, kind in [describe()]
    ]
    marks.close()
    return times


def _moved(name: str, *tensors: Tensor) -> tuple[str, int, int, Kind | None]:
    """Return name, traffic, FLOPs and kind of a copy or fill."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    on_host = any(tensor.on_host for tensor in tensors)
    return name, nbytes, 0, None if on_host else Kind.moving(name, nbytes)


def _launched(
    kernel: Kernel, grid: Any, block: Any, args: tuple, *, cost: Cost = MOVES, **_: Any
) -> tuple[str, int, int, Kind | None]:
    """Return name, traffic, FLOPs and kind of a launch; the name of a matrix product includes its
    sizes."""
    device, loaded, stored = kernel.traffic(args)
    kind = None if loaded or stored else Kind.of(kernel, args, cost, device)
    name = f"{kernel.entry} {cost.label}" if cost.label else kernel.entry
    return name, device + loaded + stored, cost.flops, kind
