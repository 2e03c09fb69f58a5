"""Collectives between GPUs: every operation and backend, eager and in replayed graphs."""

import faulthandler
import threading
import time

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, F64, U8
from llmq.comm import links
from llmq.comm.collectives import part, silenced
from llmq.comm.connect import connect
from llmq.comm.links import Link
from llmq.comm.options import CommOptions
from llmq.runtime.cuda_device import CudaDevice
from llmq.runtime.device import MemorySizes
from llmq.runtime.mesh import Mesh
from tests.conftest import gpu_problem
from tests.ranks import run_ranks

pytestmark = pytest.mark.multigpu

MIB = 1 << 20
SIZES = MemorySizes(device=1536 * MIB, stack=MIB, pinned=128 * MIB, write_combined=16 * MIB)
WORLDS = (2, 4, 8)
HANG = 60  # seconds of one test after which it has hung: print where, and end
STEPS = 12
BACKENDS = {
    "nccl": CommOptions(all_to_all_reduce=True),
    "peer": CommOptions(memcpy_all_gather=True, all_to_all_reduce=True, memcpy_send_recv=True),
    "staged": CommOptions(
        memcpy_all_gather=True, all_to_all_reduce=True, memcpy_send_recv=True, p2p="off"
    ),
    "gather by copies": CommOptions(memcpy_all_gather=True, all_to_all_reduce=True),
    "exchange by copies": CommOptions(all_to_all_reduce=True, memcpy_send_recv=True, p2p="off"),
}
BACKENDS["mixed"] = BACKENDS["peer"]  # half of the links are staged
# Elements of a part, F32: less than a chunk of the ring, and two rounds through it and a bit.
LENGTHS = (128, 9 * MIB + 128)


@pytest.fixture(autouse=True)
def no_hang():
    faulthandler.dump_traceback_later(HANG, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=WORLDS)
def world(request):
    if problem := gpu_problem():
        pytest.skip(problem)
    from cupy.cuda import runtime

    if runtime.getDeviceCount() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return request.param


@pytest.fixture(params=BACKENDS)
def options(request, monkeypatch):
    if request.param == "mixed":

        def half(p2p, source, reader, measured):
            kind = "peer" if (2 * source + reader) % 3 else "staged"
            beside_bus = kind == "peer" and source > reader
            return Link(kind=kind, speed=1.0, reason="test", beside_bus=beside_bus)

        monkeypatch.setattr(links, "choose", half)
    return BACKENDS[request.param]


def run(world, options, program):
    """program(dev, workers) in each rank's thread, the devices connected; results by rank."""
    devices = [None] * world

    def rank_fn(rank, workers):
        devices[rank] = CudaDevice(rank, SIZES, mesh=Mesh.of(world, rank))
        workers.barrier()
        if rank == 0:
            links = connect(devices, options, workers)
            print(*links.lines(), sep="\n")
        workers.barrier()
        result = program(devices[rank], workers)
        devices[rank].synchronize()
        workers.barrier()
        return result

    try:
        return run_ranks(world, rank_fn)
    finally:
        for dev in filter(None, devices):
            dev.close()


def graph_of(dev, key, step):
    """A function that replays the step; made as Rank.warm_up makes graphs, so that no driver call
    waits for a GPU that waits for a peer. The tensors that the step writes are undefined
    afterwards."""
    with silenced(dev):
        step()
        dev.synchronize()
    with dev.capture_only():
        dev.graph(key, step)
    return lambda: dev.graph(key, step)


def start_content(world, n):
    """Sources (W, n) and parts (W, W, n) by rank, F32, all different."""
    values = np.random.default_rng(n).standard_normal((world, world + 1, n), np.float32)
    return values[:, 0], values[:, 1:]


def expected(world, n, steps):
    """Sources and parts after the steps of `mixing`."""
    sources, parts = start_content(world, n)
    for _ in range(steps):
        sources, parts = np.roll(sources, -1, 0), np.roll(parts.swapaxes(0, 1), -1, 1)
    return sources, parts


def mixing(dev, n, place, in_place, graph=True, mirrored=False):
    """A function that does one step, and the tensors: source, buffer.

    A step gathers all sources and keeps that of the next rank, and exchanges all parts and
    rotates them. Whatever a step gets wrong is still wrong after the last one.
    """
    world, rank = dev.mesh.size(), dev.mesh.rank
    gathered, buffer, kept = (
        dev.alloc(name, (world * n,), F32, "Activations") for name in ("gathered", "buffer", "kept")
    )
    spare = dev.alloc("spare", (n,), F32, "Activations")
    source = part(gathered, rank, world)
    if not in_place:
        source = dev.alloc("source", (n,), F32, "Activations", place)
    mirror = dev.alloc("mirror", (n,), F32, "Activations", "pinned") if mirrored else None
    ready, done = dev.event(), dev.event()

    def step():
        if mirrored:
            dev.copy(mirror, source)
        dev.record(ready)
        with dev.on("comm"):
            dev.wait(ready)
            dev.mesh.group("shard").all_gather(gathered, source, mirror)
            found = dev.mesh.group("shard").all_to_all(buffer, spare)
            dev.record(done)
        dev.wait(done)
        for p in range(world):
            dev.copy(part(kept, p, world), found[(p + 1) % world])
        dev.copy(buffer, kept)
        dev.copy(source, part(gathered, rank + 1, world))

    if graph:
        step = graph_of(dev, (n, place, in_place), step)
    sources, parts = start_content(world, n)
    dev.upload(source, sources[rank])
    dev.upload(buffer, parts[rank].reshape(-1))
    return step, source, buffer


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_gather_and_exchange(world, options, graph, n):
    def program(dev, workers):
        step, source, buffer = mixing(dev, n, "device", False, graph)
        for _ in range(STEPS):
            step()
        return dev.download(source), dev.download(buffer).reshape(world, n)

    sources, parts = expected(world, n, STEPS)
    for rank, (source, buffer) in enumerate(run(world, options, program)):
        assert np.array_equal(source, sources[rank])
        assert np.array_equal(buffer, parts[rank])


@pytest.mark.parametrize("source", ["in place", "pinned", "write_combined", "mirrored"])
def test_sources(world, options, source):
    n = 2 * MIB + 128  # 8 MiB: two chunks and a bit

    def program(dev, workers):
        place = source if source in ("pinned", "write_combined") else "device"
        args = (place, source == "in place", True, source == "mirrored")
        step, tensor, _ = mixing(dev, n, *args)
        for _ in range(STEPS):
            step()
        return dev.download(tensor)

    sources, _ = expected(world, n, STEPS)
    for rank, found in enumerate(run(world, options, program)):
        assert np.array_equal(found, sources[rank])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_reduce_scatter(world, dtype):
    n = MIB
    # Small integers: their sums are exact in any order.
    values = np.random.default_rng(0).integers(0, 16, (world, world, n)).astype(dtype.numpy)

    def program(dev, workers):
        start, buffer = (dev.alloc("x", (world * n,), dtype, "Gradients") for _ in range(2))
        dev.upload(start, values[dev.mesh.rank].reshape(-1))

        def step():
            dev.copy(buffer, start)
            dev.mesh.group("shard").reduce_scatter(buffer)

        replay = graph_of(dev, ("step",), step)
        for _ in range(4):
            replay()
        return dev.download(part(buffer, dev.mesh.rank, world))

    for rank, found in enumerate(run(world, CommOptions(), program)):
        total = values[:, rank].astype(np.float32).sum(0)
        assert np.array_equal(found.astype(np.float32), total)


def test_graphs_of_different_lengths(world, options):
    """Graphs of different lengths take turns with the same flags and rings."""
    lengths = (128, 5 * MIB, 2 * MIB + 128)

    def program(dev, workers):
        made = [mixing(dev, n, "device", False) for n in lengths]
        for index in (0, 1, 2, 2, 1, 0, 0, 2, 1, 1, 2, 0):
            made[index][0]()
        return [dev.download(source) for _, source, _ in made]

    for rank, found in enumerate(run(world, options, program)):
        for n, source in zip(lengths, found, strict=True):
            assert np.array_equal(source, expected(world, n, 4)[0][rank])


def test_all_gather_of_codes_and_statistics(world, options):
    """Any dtype, and parts too small for one transfer unit."""

    def program(dev, workers):
        results = []
        for dtype, n in ((E4M3, 4096), (F64, 8), (BF16, 1), (U8, 3)):
            src, dst = (dev.alloc("x", (k * n,), dtype, "Activations") for k in (1, world))
            dev.upload(src, np.full(n, dev.mesh.rank + 1).astype(dtype.numpy))
            dev.mesh.group("shard").all_gather(dst, src)
            results.append(dev.download(dst).astype(np.float64))
        return results

    for results in run(world, options, program):
        for found in results:
            assert np.array_equal(found, np.repeat(np.arange(1.0, world + 1), found.size // world))


def test_a_rank_that_fails_ends_the_others(world, options):
    started = threading.Barrier(world)
    start = time.monotonic()

    def program(dev, workers):
        step, _, _ = mixing(dev, MIB, "device", False)
        step()
        dev.synchronize()
        started.wait()
        if dev.mesh.rank == 1:
            raise ValueError("broken")
        step()
        dev.synchronize()

    with pytest.raises(ValueError, match="broken"):
        run(world, options, program)
    assert time.monotonic() - start < 30


def test_the_links_are_measured(world):
    from cupy.cuda import runtime

    start = time.monotonic()
    for p2p in ("auto", "off"):
        table = links.probe(runtime, list(range(world)), p2p)
        print(*table.lines(), sep="\n")
        found = [link for row in table.links for link in row if link is not None]
        assert len(found) == world * (world - 1)
        assert all(link.speed > 1.0 for link in found)  # GB/s; less is no link
    assert {link.kind for link in found} == {"staged"}
    print(f"{(time.monotonic() - start) / 2:.3f} s for a probe")
