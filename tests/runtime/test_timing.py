"""Waits for other ranks are told from others: by the stream that an event was recorded in."""

import pytest

from llmq.dtypes import F32
from llmq.runtime import cuda_device
from llmq.runtime.cuda_device import CudaDevice
from llmq.runtime.device import MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.timing import COLLECTIVES, time_waits
from tests.runtime.fake_cuda import fake_api

SIZES = MemorySizes(device=1 << 12, stack=0, pinned=1 << 8)


@pytest.fixture
def dev(monkeypatch):
    """A fake GPU on which every event is recorded 2 ms after the one before."""
    api, order = fake_api(), {}
    record = api.runtime.eventRecord

    def eventRecord(event, stream):
        order[event] = len(order)
        record(event, stream)

    api.runtime.eventRecord = eventRecord
    api.runtime.eventCreate = lambda: api.runtime.eventCreateWithFlags(0)
    api.runtime.eventElapsedTime = lambda a, b: 2.0 * (order[b] - order[a])
    monkeypatch.setattr(cuda_device, "_api", lambda: api)
    monkeypatch.delenv("LLMQ_SYNC", raising=False)
    device = CudaDevice(0, SIZES)
    yield device
    device.close()


def recorded(dev, stream):
    event = dev.event()
    with dev.on(stream):
        dev.record(event)
    return event


def test_main_waits_for_the_comm_stream(dev):
    with time_waits(dev) as waits:
        for stream in ("comm", "copy", "store", "main"):
            dev.wait(recorded(dev, stream))
        assert waits == [], "not before the device is done"
    assert waits == [2.0]


def test_only_waits_of_the_main_stream_count(dev):
    with time_waits(dev) as waits, dev.on("store"):
        dev.wait(recorded(dev, "comm"))
    assert waits == []


def test_the_last_record_of_an_event_counts(dev):
    with time_waits(dev) as waits:
        event = recorded(dev, "comm")
        dev.record(event)
        dev.wait(event)
        with dev.on("comm"):
            dev.record(event)
        dev.wait(event)
    assert waits == [2.0]


def test_collectives_on_the_main_stream_count(dev):
    x = dev.alloc("x", (4,), F32, "Weights")
    with time_waits(dev) as waits:
        dev.comm.reduce_scatter(x)
        dev.comm.all_gather(x, x)
        with dev.on("comm"):
            dev.comm.all_gather(x, x)
    assert waits == [2.0, 2.0]


def test_afterwards_all_is_as_before(dev):
    def methods():
        return [dev.wait, dev.record, *(getattr(dev.comm, name) for name in COLLECTIVES)]

    before, graphs = methods(), dev.use_graphs
    with time_waits(dev):
        assert not dev.use_graphs
    assert methods() == before
    assert dev.use_graphs == graphs


def test_on_the_cpu_all_collectives_count():
    dev = HostDevice(SIZES)
    x = dev.alloc("x", (4,), F32, "Weights")
    with time_waits(dev) as waits, dev.on("comm"):
        dev.comm.all_gather(x, x)
        dev.wait(dev.event())
    assert len(waits) == 1
    assert waits[0] >= 0
