"""Lanes on simulated streams: every wait is needed, and a capture does not see what ran before."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import F32
from llmq.runtime.device import HOST_SPEC, MemorySizes
from llmq.runtime.lane import Lane
from llmq.runtime.plan_device import Mark, PlanDevice
from tests.runtime.fake_streams import StreamDevice
from tests.runtime.races import Span

N = 64
HALVES = (0, N // 2), (N // 2, N)
SIZES = MemorySizes(device=1 << 14, stack=1 << 8, pinned=1 << 14)


class Deaf(StreamDevice):
    """Does not make one of the waits. waits: that were to be enqueued so far."""

    deaf, waits = -1, 0

    def _wait(self, event):
        self.waits += 1
        if self.waits - 1 != self.deaf:
            super()._wait(event)


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def dev(request):
    device = Deaf(SIZES, pause=1e-4, graphs=request.param)
    yield device
    device.close()


class Host:
    """Numbers in host memory that pass through two slots on the device."""

    def __init__(self, dev, count=5):
        self.dev = dev
        self.slots = [dev.alloc(f"slot {i}", (N,), F32, "Weights") for i in range(2)]
        self.host = [dev.alloc(f"{i}", (N,), F32, "Weights", "pinned") for i in range(count)]
        for i, tensor in enumerate(self.host):
            dev.upload(tensor, np.full(N, i + 1, np.float32))
        self.lane = Lane(dev, range(2))

    def copies(self, dst, src, pieces):
        return [partial(self.dev.copy, dst.rows(*p), src.rows(*p)) for p in pieces]

    def double(self, tensor):
        def work():
            tensor.numpy()[...] *= 2

        span = [Span.of(tensor)]
        self.dev.call(work, "double", span, span)

    def content(self):
        return [float(self.dev.download(tensor)[0]) for tensor in self.host]


def update(host, pieces):
    """Each number comes, is doubled, and goes back, as an optimizer's state does."""
    lane = host.lane
    for tensor in host.host:
        host.double(tensor)
    lane.follow()
    for name, tensor in enumerate(host.host):
        slot = lane.take(name)
        here = host.slots[slot]
        lane.arrive(slot, *host.copies(here, tensor, pieces))
        lane.use(slot)
        host.double(here)
        lane.leave(slot, *host.copies(tensor, here, pieces))
    lane.join()
    for tensor in host.host:
        host.double(tensor)
    lane.forget()


def there_and_back(host, pieces):
    """Each is overwritten on the device and leaves; the last two stay, and the others come back."""
    lane, count = host.lane, len(host.host)
    for i, tensor in enumerate(host.host):
        lane.free(i % 2)
        host.dev.zero(host.slots[i % 2])
        if i < count - 2:
            lane.leave(i % 2, *host.copies(tensor, host.slots[i % 2], pieces))
    for i in reversed(range(count)):
        here = host.slots[i % 2]
        if i < count - 2:
            lane.use(i % 2)
        host.double(here)
        if i >= 2:
            lane.release(i % 2)
            lane.arrive(i % 2, *host.copies(here, host.host[i - 2], pieces))


PROGRAMS = {"update": update, "there and back": there_and_back}
RUNS = 3  # as calls, captured, replayed


@pytest.mark.parametrize("pieces", [((0, N),), HALVES], ids=["one", "two"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_content_passes_without_races(dev, program, pieces):
    host = Host(dev)
    for _ in range(RUNS):
        dev.graph((program,), lambda: PROGRAMS[program](host, pieces))
        dev.synchronize()  # no lane orders one run after another
    assert not dev.races.found
    grown = 8**RUNS
    assert host.content() == ([grown, 2 * grown, 3 * grown, 4 * grown, 5 * grown]
                              if program == "update" else [0, 0, 0, 4, 5])  # fmt: skip


@pytest.mark.parametrize("pieces", [((0, N),), HALVES], ids=["one", "two"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_wait_is_needed(program, pieces):
    """The races that are there without it are found."""

    def races(deaf):
        dev = Deaf(SIZES, graphs=False)
        try:
            host, dev.deaf = Host(dev), deaf
            PROGRAMS[program](host, pieces)
            dev.synchronize()
            return dev.races.found, dev.waits
        finally:
            dev.close()

    found, waits = races(-1)
    assert not found and waits > 10
    assert all(races(deaf)[0] for deaf in range(waits))


def test_what_left_in_pieces_is_waited_for_as_a_whole():
    """The next content arrives in another number of pieces."""
    dev = Deaf(SIZES, graphs=False)
    try:
        host, whole = Host(dev, 1), ((0, N),)
        host.dev.zero(host.slots[0])
        host.lane.leave(0, *host.copies(host.host[0], host.slots[0], HALVES))
        host.lane.arrive(0, *host.copies(host.slots[0], host.host[0], whole))
        dev.synchronize()
        assert not dev.races.found
    finally:
        dev.close()


def test_slots_take_turns():
    lane = Lane(PlanDevice(HOST_SPEC), range(2))
    assert [lane.take("a"), lane.take("b")] == [0, 1]
    with pytest.raises(AssertionError, match=r"no slot for 'c', \['a', 'b'\] are in use"):
        lane.take("c")
    lane.release(1)
    assert lane.keep("b") and lane.slot_of("b") == 1  # in use again, without arriving again
    lane.release(0)
    assert lane.take("c") == 0
    assert not lane.keep("a")
    with pytest.raises(AssertionError, match="'a' is in no slot"):
        lane.slot_of("a")
    lane.forget()
    assert not lane.keep("b") and lane.take("d") == 0


def traces(program, runs):
    """The trace that each of some runs of a program captures: works and marks, records by their
    number."""
    dev = PlanDevice(HOST_SPEC)
    tensor = dev.alloc("x", (N,), F32, "Weights")
    lane = Lane(dev, range(2))
    for run in range(runs):
        dev.graph((run,), lambda: program(dev, lane, tensor))
    found = []
    for _, trace in dev.graphs:
        last, marks = {}, []
        for i, entry in enumerate(trace):
            if isinstance(entry, Mark) and not entry.wait:
                last[entry.event] = i
            outside = isinstance(entry, Mark) and last.get(entry.event, "outside")
            marks.append((entry.stream, outside))
        found.append(marks)
    return found


def turn(dev, lane, tensor):
    slot = lane.take("content")
    lane.arrive(slot, partial(dev.zero, tensor))
    lane.use(slot)
    lane.leave(slot, partial(dev.zero, tensor))


def test_a_capture_that_starts_with_an_empty_lane_does_not_depend_on_earlier_ones():
    def from_empty(dev, lane, tensor):
        lane.forget()
        for _ in range(3):
            turn(dev, lane, tensor)
        lane.join()

    first, *others = traces(from_empty, 3)
    assert all(other == first for other in others)
    assert ("copy", "outside") not in first


def test_without_that_it_would_wait_for_events_of_another_graph():
    first, second, third = traces(turn, 3)
    assert first == second  # the other slot
    assert third != first and ("copy", "outside") in third


def test_replays_do_not_change_a_lane(dev):
    """A lane's state is of what was enqueued last, by a call or a capture, not of replays."""
    lane, tensor = Lane(dev, range(2)), dev.alloc("x", (N,), F32, "Weights")
    turns = []

    def graph():
        turns.append(lane.take(len(turns)))
        lane.release(turns[-1])

    dev.zero(tensor)
    for _ in range(4):
        dev.graph(("turn",), graph)
    replays = any(capture is not None for capture in dev.graphs.values())
    assert turns == ([0, 1] if replays else [0, 1, 0, 1])
