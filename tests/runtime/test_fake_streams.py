"""That the simulation of streams finds what it is for, and nothing else."""

import pytest

from llmq.base.dtypes import F32
from llmq.runtime.device import MemorySizes
from tests.runtime.fake_streams import StreamDevice

SIZES = MemorySizes(device=1 << 12, stack=1 << 12, pinned=1 << 16)
N = 64


@pytest.fixture
def dev():
    device = StreamDevice(SIZES)
    yield device
    device.close()


def tensors(dev, count=3):
    return [dev.alloc(name, (N,), F32, "Weights") for name in "abc"[:count]]


def found(dev):
    dev.synchronize()
    return dev.races.found


# Main does these to b while comm copies a to it, or comm reads these while main copies to them.
CONFLICTS = {
    "read after write": lambda dev, a, b, c: dev.copy(c, b),
    "write after write": lambda dev, a, b, c: dev.copy(b, c),
    "write after read": lambda dev, a, b, c: dev.zero(a),
    "scratch": lambda dev, a, b, c: None,
}


def conflict(dev, kind, ordered):
    a, b, c = tensors(dev)
    done = dev.event()
    with dev.on("comm"):
        if kind == "scratch":
            with dev.scratch("x", (N,), F32) as x:
                dev.zero(x)
        else:
            dev.copy(b, a)
        dev.record(done)
    if ordered:
        dev.wait(done)
    if kind == "scratch":
        with dev.scratch("y", (N,), F32) as y:
            dev.zero(y)
    CONFLICTS[kind](dev, a, b, c)


@pytest.mark.parametrize("kind", CONFLICTS)
def test_races(dev, kind):
    conflict(dev, kind, ordered=True)
    assert not found(dev)


@pytest.mark.parametrize("kind", CONFLICTS)
def test_missing_waits(dev, kind):
    """Whichever of both came first."""
    conflict(dev, kind, ordered=False)
    assert found(dev) and "comm" in dev.races.found[0] and "main" in dev.races.found[0]


def test_reads_of_the_same_and_writes_of_different_places_are_no_races(dev):
    a, b, c = tensors(dev)
    with dev.on("comm"):
        dev.copy(b, a)
    dev.copy(c, a)
    with dev.on("copy"):
        dev.zero(dev.alloc("d", (N,), F32, "Weights"))
    assert not found(dev)


def test_graphs_join_their_streams(dev):
    """A replay does what calls would have to do with events; at first there are only calls."""
    a, b, c = tensors(dev)

    def work():
        with dev.on("comm"):
            dev.copy(b, a)

    def step():
        dev.zero(a)
        dev.graph(("work",), work)
        dev.copy(c, b)

    step()
    assert len(found(dev)) == 2  # of a and of b
    dev.graph(("work",), work)  # waits for what comm did before
    dev.races.found.clear()
    for _ in range(3):
        step()
    assert not found(dev)
