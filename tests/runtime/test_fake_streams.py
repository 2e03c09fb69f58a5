"""That the simulation of streams finds what it is for, and nothing else."""

import time

import pytest

from llmq.base.dtypes import F32
from llmq.comm.options import CommOptions
from llmq.runtime.device import MemorySizes
from llmq.runtime.mesh import Mesh
from tests.ranks import run_ranks
from tests.runtime.fake_comm import connect_streams, link_kinds
from tests.runtime.fake_streams import StreamDevice
from tests.runtime.races import Races

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


def test_what_is_known_is_passed_on(dev):
    """main waits for comm, which has waited for copy; but not for what copy did later."""
    a, b, c = tensors(dev)
    first, second = dev.event(), dev.event()
    with dev.on("copy"):
        dev.zero(a)
        dev.record(first)
        dev.zero(c)
    with dev.on("comm"):
        dev.wait(first)
        dev.record(second)
    dev.wait(second)
    dev.copy(b, a)
    assert not found(dev)
    dev.copy(b, c)
    assert len(found(dev)) == 1


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


@pytest.mark.parametrize("copies", [False, True])
def test_collectives(copies):
    """Calls of one rank on two streams need order; so do a source's writing and its gathering."""
    options = CommOptions(
        memcpy_all_gather=copies, memcpy_send_recv=copies, all_to_all_reduce=True, p2p="auto"
    )
    sizes = MemorySizes(device=1 << 12, stack=1 << 12, pinned=1 << 27)

    def lines(program):
        races, devices = Races(), [None, None]

        def rank_fn(rank, workers):
            dev = devices[rank] = StreamDevice(sizes, races=races, mesh=Mesh.of(2, rank))
            workers.barrier()
            if rank == 0:
                connect_streams(devices, options, workers, kinds=link_kinds(2, "peer"))
            workers.barrier()
            src, dst = (dev.alloc("x", (k * N,), F32, "Weights") for k in (1, 2))
            program(dev, dst, src)
            dev.synchronize()

        try:
            run_ranks(2, rank_fn)
        finally:
            for dev in devices:
                dev.close()
        return races.found

    def ordered(dev, dst, src):
        dev.zero(src)
        dev.mesh.group("shard").all_gather(dst, src)
        dev.zero(src)

    def two_streams(dev, dst, src):
        with dev.on("comm"):
            dev.mesh.group("shard").all_gather(dst, src)
        dev.call(lambda: time.sleep(0.3))  # enough here, but nothing guarantees it
        dev.mesh.group("shard").all_gather(dst, src)

    assert not lines(ordered)
    assert any("all_gather" in line for line in lines(two_streams))
