"""Collectives on the CPU: against NumPy, what they refuse, how they end, and what a plan counts."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32
from llmq.comm.collectives import part
from llmq.comm.connect import connect
from llmq.comm.options import KINDS, STAGING_CHUNK, STAGING_CHUNKS, CommOptions
from llmq.runtime.arena import align_up
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.mesh import Mesh
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.workers import Stopped
from tests.ranks import run_devices

WORLDS = (1, 2, 3, 4)
COPIES = CommOptions(memcpy_all_gather=True, all_to_all_reduce=True, memcpy_send_recv=True)
N = 24  # elements of a part


def parts_of(rng, world, dtype):
    """Random (W, W, N) by rank and part."""
    return rng.standard_normal((world, world, N)).astype(dtype.numpy)


def make(dev, array, dtype, place="device"):
    tensor = dev.alloc("x", array.shape, dtype, "Activations", place)
    dev.upload(tensor, array)
    return tensor


def same(a, b):
    """Bitwise equality."""
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


# -- all_gather --


@pytest.mark.parametrize("dtype", [F32, BF16, E4M3])
@pytest.mark.parametrize("place", ["device", "pinned", "stack"])
@pytest.mark.parametrize("world", WORLDS)
def test_all_gather(rng, world, place, dtype):
    sources = rng.standard_normal((world, N)).astype(dtype.numpy)

    def fn(dev, workers):
        dst = dev.alloc("dst", (world * N,), dtype, "Weights")
        with dev.scratch("src", (N,), dtype) as scratch:
            src = scratch if place == "stack" else make(dev, sources[0], dtype, place)
            dev.upload(src, sources[dev.mesh.rank])
            dev.mesh.group("shard").all_gather(dst, src)
        return dev.download(dst)

    for result in run_devices(world, fn):
        assert same(result, sources.reshape(-1))


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_in_place(rng, world):
    sources = rng.standard_normal((world, N)).astype(np.float32)

    def fn(dev, workers):
        dst = dev.alloc("dst", (world * N,), F32, "Weights")
        for step in range(3):
            src = part(dst, dev.mesh.rank, world)
            dev.upload(src, sources[dev.mesh.rank] + np.float32(step))
            dev.mesh.group("shard").all_gather(dst, src)
        return dev.download(dst)

    for result in run_devices(world, fn):
        assert same(result, (sources + np.float32(2)).reshape(-1))


def test_a_source_may_be_written_at_once():
    def fn(dev, workers):
        src = make(dev, np.zeros(N, np.float32), F32)
        dst = make(dev, np.zeros(2 * N, np.float32), F32)
        found = []
        for value in range(20):
            src.numpy().fill(value)
            dev.mesh.group("shard").all_gather(dst, src)
            found.append(dst.numpy()[[0, -1]].tolist())
        return found

    assert run_devices(2, fn) == [[[value, value] for value in range(20)]] * 2


# -- reduce_scatter --


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_reduce_scatter(rng, world, dtype):
    parts = parts_of(rng, world, dtype)

    def fn(dev, workers):
        buffer = make(dev, parts[dev.mesh.rank].reshape(-1), dtype)
        dev.mesh.group("shard").reduce_scatter(buffer)
        return dev.download(buffer)

    for rank, result in enumerate(run_devices(world, fn)):
        total = parts[0, rank].astype(np.float32)
        for source in range(1, world):
            total += parts[source, rank].astype(np.float32)
        own = slice(rank * N, (rank + 1) * N)
        assert same(result[own], total.astype(dtype.numpy))
        assert np.isnan(np.delete(result.astype(np.float32), own)).all()


# -- all_to_all --


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all(rng, world):
    parts = parts_of(rng, world, BF16)

    def fn(dev, workers):
        buffer = dev.alloc("buffer", (world * N,), BF16, "Gradients")
        spare = None if world == 1 else dev.alloc("spare", (N,), BF16, "Gradients")
        results = []
        for _ in range(3):
            dev.upload(buffer, parts[dev.mesh.rank].reshape(-1))
            found = dev.mesh.group("shard").all_to_all(buffer, spare)
            results.append([dev.download(t) for t in found])
        return results, [t.offset for t in found], buffer.offset, spare and spare.offset

    for rank, (results, offsets, buffer, spare) in enumerate(run_devices(world, fn)):
        for result in results:
            assert same(result, parts[:, rank])
        for k in range(world):  # own part stays, round 1 in spare, round k in part r + k - 1
            slot = buffer + 2 * N * ((rank + max(k - 1, 0)) % world)
            assert offsets[(rank - k) % world] == (spare if k == 1 else slot)


# -- what is refused, and how it ends --


@pytest.mark.parametrize("waiting", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_rank_that_fails_ends_the_others(waiting):
    ended = []
    connected = threading.Barrier(3)

    def fn(dev, workers):
        buffer, spare = (make(dev, np.zeros(n, np.float32), F32) for n in (3 * N, N))
        connected.wait()
        if dev.mesh.rank == 1:
            raise ValueError("broken")
        try:
            match waiting:
                case "all_gather":
                    dev.mesh.group("shard").all_gather(buffer, spare)
                case "reduce_scatter":
                    dev.mesh.group("shard").reduce_scatter(buffer)
                case "all_to_all":
                    dev.mesh.group("shard").all_to_all(buffer, spare)
        except Stopped:
            ended.append((dev.mesh.rank, dev.last_operation))
            raise

    with pytest.raises(ValueError, match="broken"):
        run_devices(3, fn)
    assert [rank for rank, _ in sorted(ended)] == [0, 2]
    assert all(operation.startswith(waiting) for _, operation in ended)


def test_stopped_ranks_do_not_go_on():
    def fn(dev, workers):
        if dev.mesh.rank == 1:
            workers.stop()
        dev.mesh.group("shard").reduce_scatter(make(dev, np.zeros(2, np.float32), F32))

    with pytest.raises(Stopped):
        run_devices(2, fn)


# -- plans --


def every_call(dev):
    """All operations once, with parts of 24 elements."""
    world = dev.mesh.size()
    buffer = dev.alloc("buffer", (world * N,), F32, "Gradients")
    spare, src = (dev.alloc(name, (N,), F32, "Gradients") for name in ("spare", "src"))
    dev.mesh.group("shard").all_gather(buffer, src)
    dev.mesh.group("shard").all_gather(buffer, part(buffer, dev.mesh.rank, world))
    dev.mesh.group("shard").reduce_scatter(buffer)
    dev.mesh.group("shard").all_to_all(buffer, spare)


def test_a_plan_counts_bytes():
    plan = PlanDevice(HOST_SPEC, mesh=Mesh.of(4, 1))
    connect([plan], CommOptions())
    plan.graph((), lambda: every_call(plan))
    received, own = 3 * N * 4, N * 4
    ((_, trace),) = plan.graphs
    assert [(work.entry, work.received) for work in trace] == [
        (name, received) for name in ("all_gather", "all_gather", "reduce_scatter", "all_to_all")
    ]
    assert plan.bytes == {
        "all_gather": 4 * received + 2 * own,
        "reduce_scatter": 2 * received,
        "all_to_all": 2 * received,
    }
    assert plan.launches == {"all_gather": 2, "reduce_scatter": 1, "all_to_all": 1}
    assert plan.last_operation == "all_to_all buffer"


@pytest.mark.parametrize(
    ("options", "flags", "staging"),
    [
        (CommOptions(), False, False),
        (CommOptions(memcpy_send_recv=True), False, False),
        (COPIES, True, True),
        (CommOptions(memcpy_all_gather=True, p2p="off"), True, True),
        (CommOptions(memcpy_all_gather=True, p2p="on"), True, False),
        (CommOptions(all_to_all_reduce=True, memcpy_send_recv=True), True, True),
    ],
)
def test_a_plan_allocates_what_a_run_does(options, flags, staging):
    gpu = PlanDevice(replace(HOST_SPEC, name="a GPU"), mesh=Mesh.of(2))
    connect([gpu], options)
    expected = flags * align_up(4 * 2 * KINDS) + staging * STAGING_CHUNKS * STAGING_CHUNK
    assert gpu.arenas["pinned"].used == expected
    plan = PlanDevice(HOST_SPEC, mesh=Mesh.of(2))
    connect([plan], options)
    assert plan.arenas["pinned"].used == 0, "on the CPU nothing is staged"

    def fn(dev, workers):
        every_call(dev)
        return dev.arenas["pinned"].used, dev.arenas["device"].used

    every_call(plan)
    used = plan.sizes()["pinned"], plan.sizes()["device"]
    assert run_devices(2, fn, options=options) == [used, used]


def test_one_rank_needs_nothing():
    plan = PlanDevice(HOST_SPEC)
    connect([plan], COPIES)
    every_call(plan)
    assert plan.arenas["pinned"].used == 0
    assert set(plan.bytes) == {"copy"}
