"""Waits for other ranks are told from others: by the stream that an event was recorded in."""

import pytest

from llmq.base.dtypes import F32
from llmq.comm.collectives import silenced
from llmq.comm.connect import connect
from llmq.comm.options import CommOptions
from llmq.runtime import cuda_api
from llmq.runtime.cuda_device import CudaDevice
from llmq.runtime.device import Clock, MemorySizes
from llmq.runtime.host_device import HostDevice
from tests.runtime.fake_cuda import FakeApi

SIZES = MemorySizes(device=1 << 12, stack=0, pinned=1 << 8)


def clocked(dev):
    """The calls of the device's clock."""
    said = []
    dev.clock = Clock(lambda: said.append("start"), lambda: said.append("stop"))
    return said


@pytest.fixture
def dev(monkeypatch):
    """A fake GPU."""
    api = FakeApi()
    monkeypatch.setattr(cuda_api, "load", lambda: api)
    monkeypatch.delenv("LLMQ_SYNC", raising=False)
    device = CudaDevice(0, SIZES)
    connect([device], CommOptions())
    yield device
    device.close()


def recorded(dev, stream):
    event = dev.event()
    with dev.on(stream):
        dev.record(event)
    return event


def test_main_waits_for_the_comm_stream(dev):
    said, wait = clocked(dev), dev.api.streamWaitEvent
    dev.api.streamWaitEvent = lambda *args: (said.append("wait"), wait(*args))
    for stream in ("comm", "copy", "store", "main"):
        dev.wait(recorded(dev, stream))
    assert said == ["start", "wait", "stop", "wait", "wait", "wait"]


def test_only_waits_of_the_main_stream_count(dev):
    said, event = clocked(dev), recorded(dev, "comm")
    with dev.on("store"):
        dev.wait(event)
    assert said == []
    dev.wait(event)
    assert said == ["start", "stop"]


def test_a_wait_for_what_was_waited_for_takes_no_time(dev):
    said, event = clocked(dev), recorded(dev, "comm")
    dev.wait(event)
    dev.wait(event)
    assert said == ["start", "stop"]


def test_the_last_record_of_an_event_counts(dev):
    said, event = clocked(dev), recorded(dev, "comm")
    dev.record(event)
    dev.wait(event)
    assert said == []
    with dev.on("comm"):
        dev.record(event)
    dev.wait(event)
    assert said == ["start", "stop"]


def test_collectives_on_the_main_stream_count(dev):
    said, x = clocked(dev), dev.alloc("x", (4,), F32, "Weights")

    def collectives():
        dev.mesh.group("shard").reduce_scatter(x)
        dev.mesh.group("shard").all_gather(x, x)
        dev.mesh.group("shard").all_to_all(x, None)

    collectives()
    with silenced(dev):
        dev.mesh.group("shard").all_gather(x, x)
    assert said == ["start", "stop"] * 4
    with dev.on("comm"):
        collectives()
    assert len(said) == 8


def test_waits_in_a_capture_are_measured_in_each_replay(dev):
    said = clocked(dev)

    def work():
        dev.wait(recorded(dev, "comm"))

    for expected in (1, 2, 2):
        dev.graph(("work",), work)
        assert said == ["start", "stop"] * expected


def test_a_wait_within_another_is_not_counted_twice(dev):
    said, event = clocked(dev), recorded(dev, "comm")
    with dev.exposed():
        dev.wait(event)
    assert said == ["start", "stop"]


def test_after_a_failure_the_clock_goes_on(dev):
    said = clocked(dev)
    with pytest.raises(KeyError), dev.exposed():
        raise KeyError
    assert said == ["start"]
    with dev.exposed():
        pass
    assert said == ["start", "start", "stop"]


def test_on_the_cpu_all_collectives_count():
    dev = HostDevice(SIZES)
    connect([dev], CommOptions())
    said, x = clocked(dev), dev.alloc("x", (4,), F32, "Weights")
    with dev.on("comm"):
        dev.mesh.group("shard").all_gather(x, x)
        dev.wait(recorded(dev, "comm"))
    assert said == ["start", "stop"]
