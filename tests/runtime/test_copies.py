"""The protocol of flags, rounds and staging rings, on streams that are threads."""

import threading
import time

import numpy as np
import pytest

from llmq.base.dtypes import F32, I32, U8
from llmq.comm.collectives import part
from llmq.comm.options import (
    EMPTY,
    EXCHANGED,
    FULL,
    KINDS,
    RELEASED,
    RING,
    STAGING_CHUNKS,
    TARGET,
    CommOptions,
    Flags,
)
from llmq.runtime.device import MemorySizes
from llmq.runtime.mesh import Mesh
from llmq.runtime.workers import Stopped, Workers
from tests.covering import pairwise
from tests.ranks import run_ranks
from tests.runtime.fake_comm import connect_streams, link_kinds
from tests.runtime.fake_streams import PATIENCE, StreamDevice
from tests.runtime.races import Races, Span

SIZES = MemorySizes(device=1 << 16, stack=1 << 12, pinned=1 << 16)
OPTIONS = CommOptions(memcpy_all_gather=True, all_to_all_reduce=True, memcpy_send_recv=True)
N = 75  # elements of a part: 300 bytes, four chunks of 64 and one of 44
EVEN = 76  # the same, and parts begin at multiples of the 8 bytes that races are looked for in
CHUNK = 64
WORLDS = (2, 3, 4, 8)
REPEATS = 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("llmq.comm.options.STAGING_CHUNK", CHUNK)


def run(world, kinds, program, *, pause=0.001, races=None, context=1, **how):
    """program(dev, workers) in each rank's thread; everything done, the results by rank."""
    devices = [None] * world

    def rank_fn(rank, workers):
        options = {"pause": pause, "seed": world, "races": races}
        dev = StreamDevice(SIZES, mesh=Mesh.of(world, rank, context=context), **options)
        devices[rank] = dev
        workers.barrier()
        if rank == 0:
            connect_streams(devices, OPTIONS, workers, kinds=kinds, piece=CHUNK, **how)
        workers.barrier()
        result = program(dev, workers)
        dev.synchronize()
        return result

    try:
        return run_ranks(world, rank_fn)
    finally:
        for dev in devices:
            dev.close()


def content(rank, step, index=0):
    """The values that a rank writes into part `index` in a step: F32 (N,)."""
    return (np.arange(N) + 1000 * rank + 100 * index + 10000 * step).astype(np.float32)


class Counter:
    """Counts on a stream, so that a replayed graph writes new content."""

    def __init__(self):
        self.step = -1

    def advance(self):
        self.step += 1


def both(dev, place, in_place, seen):
    """A function that enqueues one step: gather and exchange on comm, the rest on main.

    Appends what main finds after each to seen. Ranks meet only where the protocol makes them.
    """
    world, counter = dev.mesh.size(), Counter()
    gathered = dev.alloc("gathered", (world * N,), F32, "Weights")
    buffer = dev.alloc("buffer", (world * N,), F32, "Gradients")
    spare = dev.alloc("spare", (N,), F32, "Gradients")
    source = dev.alloc("source", (N,), F32, "Master", place)
    if in_place:
        source = part(gathered, dev.mesh.rank, world)
    ready, done = dev.event(), dev.event()

    def write():
        counter.advance()
        source.numpy()[:] = content(dev.mesh.rank, counter.step)
        for p in range(world):
            part(buffer, p, world).numpy()[:] = content(dev.mesh.rank, counter.step, p)

    def step():
        dev.call(write)
        dev.record(ready)
        with dev.on("comm"):
            dev.wait(ready)
            dev.mesh.group("shard").all_gather(gathered, source)
            parts = dev.mesh.group("shard").all_to_all(buffer, spare)
            dev.record(done)
        dev.wait(done)
        dev.call(lambda: seen.append([t.numpy().copy() for t in (gathered, *parts)]))

    return step


def check(world, results):
    for rank, seen in enumerate(results):
        assert len(seen) == REPEATS
        for step, (gathered, *parts) in enumerate(seen):
            np.testing.assert_array_equal(
                gathered, np.concatenate([content(s, step) for s in range(world)])
            )
            for source in range(world):
                np.testing.assert_array_equal(parts[source], content(source, step, rank))


@pytest.mark.parametrize(
    ("world", "kind", "how"),
    pairwise(world=WORLDS, kind=("peer", "staged", "mixed"), how=("eager", "paced", "graph")),
)
def test_gather_and_exchange(world, kind, how):
    def program(dev, workers):
        seen = []
        step = both(dev, "device", False, seen)
        for _ in range(REPEATS):
            dev.graph(("step",), step) if how == "graph" else step()
        dev.synchronize()
        return seen

    paced = {"paced": True, "span_chunks": 2} if how == "paced" else {}
    check(world, run(world, link_kinds(world, kind), program, **paced))


@pytest.mark.parametrize("kind", ["peer", "staged", "beside", "mixed"])
@pytest.mark.parametrize("source", ["in place", "pinned"])
def test_sources(source, kind):
    def program(dev, workers):
        seen = []
        place = "pinned" if source == "pinned" else "device"
        step = both(dev, place, source == "in place", seen)
        for _ in range(REPEATS):
            step()
        dev.synchronize()
        return seen

    check(3, run(3, link_kinds(3, kind), program))


@pytest.mark.parametrize("kind", ["peer", "staged"])
def test_graphs_of_different_collectives_share_flags_and_rings(kind):
    """Lengths differ, so that the rings' next buffers differ from one graph to the next."""

    def program(dev, workers):
        world, found = dev.mesh.size(), []
        counter = Counter()
        tensors = []
        for n in (20, 90, 4):
            src, dst = (dev.alloc("x", (k * n,), I32, "Weights") for k in (1, world))
            tensors.append((src, dst))

        def step(index):
            src, dst = tensors[index]
            dev.call(
                lambda: (counter.advance(), src.numpy().fill(100 * dev.mesh.rank + counter.step))
            )
            dev.mesh.group("shard").all_gather(dst, src)
            dev.call(lambda: found.append(dst.numpy().reshape(world, -1).copy()))

        order = [0, 1, 1, 2, 0, 2, 2, 1, 0]
        for index in order:
            dev.graph((index,), lambda index=index: step(index))
        dev.synchronize()
        assert len(found) == len(order)
        for number, array in enumerate(found):
            expected = 100 * np.arange(world)[:, None] + number
            np.testing.assert_array_equal(array, np.broadcast_to(expected, array.shape))

    run(4, link_kinds(4, kind), program)


@pytest.mark.parametrize("kind", ["peer", "staged", "mixed"])
@pytest.mark.parametrize("count", [1, 2])
def test_buffers_are_used_again_at_once(count, kind):
    """Nothing but the order of the stream separates the sending from the next writing."""

    def program(dev, workers):
        world, found = dev.mesh.size(), []
        spares = [dev.alloc("spare", (N,), F32, "Gradients") for _ in range(count)]
        slots = [dev.alloc("slot", (world * N,), F32, "Gradients") for _ in range(count)]
        for step in range(4 * REPEATS):
            slot, spare = slots[step % count], spares[step % count]
            event = dev.event()

            def write(slot=slot, step=step):
                for p in range(world):
                    part(slot, p, world).numpy()[:] = content(dev.mesh.rank, step, p)

            dev.call(write)
            dev.record(event)
            with dev.on("comm"):
                dev.wait(event)
                parts = dev.mesh.group("shard").all_to_all(slot, spare)
                dev.call(lambda parts=parts: found.append([t.numpy().copy() for t in parts]))
                dev.record(event)
            dev.wait(event)
        dev.synchronize()
        for step, parts in enumerate(found):
            for source, array in enumerate(parts):
                np.testing.assert_array_equal(array, content(source, step, dev.mesh.rank))

    run(3, link_kinds(3, kind), program)


def test_what_is_staged_leaves_before_its_turn(monkeypatch):
    """The peer has it while the stream of the exchanges is still busy."""
    monkeypatch.setattr("llmq.comm.options.STAGING_CHUNK", 4 * N)
    arrived, in_time = threading.Event(), []

    def program(dev, workers):
        buffer, spare = (dev.alloc("x", (k * N,), F32, "Gradients") for k in (dev.mesh.size(), 1))
        written = dev.event()
        dev.call(lambda: buffer.numpy().fill(dev.mesh.rank))
        dev.record(written)
        with dev.on("comm"):
            dev.wait(written)
            if dev.mesh.rank == 0:
                dev.call(lambda: in_time.append(arrived.wait(PATIENCE)))
            parts = dev.mesh.group("shard").all_to_all(buffer, spare, written)
            if dev.mesh.rank == 1:
                dev.call(arrived.set)
        dev.synchronize()
        return [float(t.numpy().mean()) for t in parts]

    assert run(2, link_kinds(2, "staged"), program) == [[0, 1], [0, 1]]
    assert in_time == [True]


def test_each_source_is_staged_once():
    def program(dev, workers):
        sends = []
        staging = dev.mesh.group("shard")._copies._staging
        send = staging.send
        staging.send = lambda *args: (sends.append(args), send(*args))
        src, dst = (dev.alloc("x", (k * N,), F32, "Weights") for k in (1, dev.mesh.size()))
        dev.mesh.group("shard").all_gather(dst, src)
        return [(nbytes, readers) for _, nbytes, readers, _ in sends]

    kinds = link_kinds(4, "peer")
    kinds[2][0] = kinds[3][0] = "staged"  # reader, source
    assert run(4, kinds, program) == [[(4 * N, [2, 3])], [], [], []]


@pytest.mark.parametrize(("kind", "loaded"), [("peer", 4), ("staged", 4), ("beside", 1)])
def test_a_pinned_source_is_loaded_once_where_links_are_beside_the_bus(kind, loaded):
    def program(dev, workers):
        sizes = []
        copies = dev.mesh.group("shard")._copies
        queue, memories = copies._queue, copies._storages
        copy = queue.copy

        def noted(dst, src, nbytes):
            pinned = [memory["pinned"] for memory in memories]
            if any(p.base <= src < p.base + p.bytes.size for p in pinned):
                sizes.append(nbytes)
            copy(dst, src, nbytes)

        queue.copy = noted
        src = dev.alloc("src", (N,), F32, "Weights", "pinned")
        dev.mesh.group("shard").all_gather(
            dev.alloc("dst", (dev.mesh.size() * N,), F32, "Weights"), src
        )
        return sum(sizes)

    assert run(4, link_kinds(4, kind), program) == [loaded * 4 * N] * 4


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["peer", "staged", "beside", "mixed"])
def test_mirrors_are_read_by_those_who_cannot_be_reached(kind, how):
    kinds = link_kinds(3, kind)

    def program(dev, workers):
        src, dst = (dev.alloc("x", (k * N,), F32, "Weights") for k in (1, dev.mesh.size()))
        mirror = dev.alloc("mirror", (N,), F32, "Weights", "pinned")
        seen, counter = [], Counter()

        def write():
            counter.advance()
            src.numpy()[:] = content(dev.mesh.rank, counter.step)
            mirror.numpy()[:] = -src.numpy()

        def step():
            dev.call(write)
            dev.mesh.group("shard").all_gather(dst, src, mirror)
            dev.call(lambda: seen.append(dst.numpy().reshape(dev.mesh.size(), N).copy()))

        for _ in range(REPEATS):
            dev.graph(("step",), step) if how == "graph" else step()
        dev.synchronize()
        return seen

    for reader, steps in enumerate(run(3, kinds, program)):
        for step, parts in enumerate(steps):
            for source in range(3):
                mirrored = source != reader and kinds[reader][source] == "staged"
                expected = content(source, step) * (-1 if mirrored else 1)
                np.testing.assert_array_equal(parts[source], expected)


@pytest.mark.parametrize(("world", "context"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("kind", ["peer", "staged", "mixed"])
def test_parts_of_sequences_are_exchanged_beside_gathers(world, context, kind):
    """By flags and rings of their own; the source may be written at once."""

    def program(dev, workers):
        group, rank, found = dev.mesh.group("context"), dev.mesh.rank, []
        names = {"x": context * N, "out": context * N, "own": N, "all": world * N}
        x, out, own, whole = (dev.alloc(n, (s,), F32, "Weights") for n, s in names.items())
        for step in range(REPEATS):
            with dev.on("comm"):
                dev.call(lambda step=step: own.numpy().fill(content(rank, step)[0]))
                dev.mesh.group("shard").all_gather(whole, own)
            for p in range(context):
                piece, values = part(x, p, context), content(rank, step, p)
                dev.call(lambda piece=piece, values=values: np.copyto(piece.numpy(), values))
            group.exchange(out, x)
            dev.call(lambda: found.append(out.numpy().copy()))
        dev.synchronize()
        return found

    kinds = link_kinds(world, kind)
    for rank, found in enumerate(run(world, kinds, program, context=context)):
        mesh = Mesh.of(world, rank, context=context)
        for step, parts in enumerate(found):
            sources = mesh.ranks("context")
            want = [content(source, step, mesh.index("context")) for source in sources]
            np.testing.assert_array_equal(parts, np.concatenate(want))


def test_without_its_flags_the_protocol_fails():
    """The simulation finds what the flags are for."""

    def program(dev, workers):
        seen = []
        step = both(dev, "device", False, seen)
        for _ in range(REPEATS):
            step()
        dev.synchronize()
        return seen

    results = run(3, link_kinds(3, "mixed"), program, deaf=True)
    with pytest.raises(AssertionError):
        check(3, results)


def test_nobody_is_written_before_it_has_come():
    """Whichever rank is slow."""

    def program(dev, workers):
        times = []
        src, dst = (dev.alloc("x", (k * N,), F32, "Weights") for k in (1, dev.mesh.size()))
        for slow in range(dev.mesh.size()):
            dev.call(lambda slow=slow: time.sleep(0.02 * (slow == dev.mesh.rank)))
            dev.call(lambda: times.append(time.monotonic()))
            dev.mesh.group("shard").all_gather(dst, src)
            dev.call(lambda: times.append(time.monotonic()))
        dev.synchronize()
        return times

    times = np.array(run(4, link_kinds(4, "peer"), program)).reshape(4, 4, 2)  # rank, round
    assert (times[:, :, 1].min(0) >= times[:, :, 0].max(0)).all()


def test_copies_from_another_gpu_are_found():
    """The driver would let that GPU do them, in an order in which ranks can wait in a circle."""

    def program(dev, workers):
        copies = dev.mesh.group("shard")._copies
        queue, other = copies._queue, copies._storages[1 - dev.mesh.rank]
        own = dev.alloc("x", (N,), F32, "Weights")
        with pytest.raises(AssertionError, match="reads another GPU"):
            queue.copy(own.ptr, other["device"].base, 4)

    run(2, link_kinds(2, "peer"), program)


def test_stopped_ranks_stop_waiting():
    """Rank 1 fails; the streams of the others go on, whatever they wait for."""
    ended, enqueued = [], threading.Barrier(3)

    def program(dev, workers):
        buffer, spare = (dev.alloc("x", (k * N,), F32, "Weights") for k in (3, 1))
        for _ in range(3 * (dev.mesh.rank != 1)):
            dev.mesh.group("shard").all_gather(buffer, spare)
            dev.mesh.group("shard").all_to_all(buffer, spare)
        enqueued.wait()
        if dev.mesh.rank == 1:
            raise ValueError("broken")
        dev.synchronize()
        ended.append(dev.mesh.rank)
        with pytest.raises(Stopped):
            dev.mesh.group("shard").all_gather(buffer, spare)
        assert dev.last_operation == "all_gather x"

    with pytest.raises(ValueError, match="broken"):
        run(3, link_kinds(3, "mixed"), program)
    assert sorted(ended) == [0, 2]


def test_flags():
    devices = [StreamDevice(SIZES, mesh=Mesh.of(3, r)) for r in range(3)]
    tensors = [d.alloc("flags", (KINDS * 3,), I32, "Activations", "pinned") for d in devices]
    flags = Flags(tensors)
    for tensor in tensors:
        states = tensor.numpy().reshape(KINDS, 3)
        targets = [TARGET, EXCHANGED]
        assert (states[targets] == FULL).all() and (np.delete(states, targets, 0) == EMPTY).all()
    kinds = (TARGET, RING + STAGING_CHUNKS - 1)
    addresses = {flags.address(k, s, r) for k in kinds for s in range(3) for r in range(3)}
    assert len(addresses) == 18
    assert RING + STAGING_CHUNKS <= KINDS
    assert flags.address(1, 2, 1) == tensors[1].ptr + 4 * (3 + 2)
    flags.release([1])
    assert (tensors[1].numpy() == RELEASED).all() and not (tensors[0].numpy() == RELEASED).any()
    assert RELEASED & FULL and RELEASED & EMPTY and not FULL & EMPTY


def test_reduce_scatter_needs_nccl():
    dev = StreamDevice(SIZES, mesh=Mesh.of(2))
    other = StreamDevice(SIZES, mesh=Mesh.of(2, 1))
    connect_streams([dev, other], OPTIONS, Workers(2), kinds=link_kinds(2, "peer"))
    with pytest.raises(RuntimeError, match="reduce_scatter needs NCCL"):
        dev.mesh.group("shard").reduce_scatter(dev.alloc("x", (4,), F32, "Gradients"))
    with pytest.raises(TypeError):
        dev.mesh.group("shard").reduce_scatter(dev.alloc("x", (4,), U8, "Gradients"))


SOURCES = {"device": ("device", None), "pinned": ("pinned", None), "mirror": ("device", "pinned")}


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["peer", "staged", "beside", "mixed"])
@pytest.mark.parametrize("source", SOURCES)
def test_what_was_read_may_be_written_again(source, kind, how):
    """Directly after a collective, in its stream: nobody reads late, whatever the pauses are."""
    place, mirrored = SOURCES[source]

    def program(dev, workers):
        n, whole = (EVEN,), (dev.mesh.size() * EVEN,)
        dst, buffer, spare = (dev.alloc("x", shape, F32, "Weights") for shape in (whole, whole, n))
        src = dev.alloc("src", n, F32, "Weights", place)
        mirror = mirrored and dev.alloc("mirror", n, F32, "Weights", mirrored)
        written, free = dev.event(), [t for t in (src, dst, mirror) if t]

        def gather():
            dev.mesh.group("shard").all_gather(dst, src, mirror)
            for tensor in free:
                dev.zero(tensor)

        def exchange():
            dev.zero(buffer)
            dev.record(written)
            with dev.on("comm"):
                dev.wait(written)
                dev.mesh.group("shard").all_to_all(buffer, spare, written)
                dev.zero(buffer)
                dev.zero(spare)
                dev.record(written)
            dev.wait(written)

        steps = {"gather": gather, "exchange": exchange}
        # Replays follow on others than those after which they were captured.
        for name in ("gather", "exchange", "exchange", "gather", "gather", "gather", "exchange"):
            dev.graph((name,), steps[name]) if how == "graph" else steps[name]()

    races = Races()
    run(3, link_kinds(3, kind), program, races=races, pause=0)
    assert not races.found, "\n".join(sorted(set(races.found)))


@pytest.mark.parametrize("kind", ["peer", "staged", "mixed"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_exchanges_that_leave_before_their_turn(world, kind):
    """Two buffers and one spare in turns, as blocks of gradients; lengths differ."""

    def program(dev, workers):
        slots = [dev.alloc("slot", (world * 4 * EVEN,), F32, "Gradients") for _ in range(2)]
        spare = dev.alloc("spare", (4 * EVEN,), F32, "Gradients")
        written, done = dev.event(), [dev.event() for _ in range(2)]
        found = []

        def write(slot, step):
            for p in range(world):
                part(slot, p, world).numpy().fill(100 * step + 10 * dev.mesh.rank + p)

        def step():
            for i, n in enumerate((EVEN, 4 * EVEN, 2, EVEN, 4 * EVEN)):
                slot = slots[i % 2].rows(0, world * n)
                if i > 1:
                    dev.wait(done[i % 2])
                dev.call(lambda slot=slot, i=i: write(slot, i), "write", [], [Span.of(slot)])
                dev.record(written)
                with dev.on("comm"):
                    dev.wait(written)
                    parts = dev.mesh.group("shard").all_to_all(slot, spare.rows(0, n), written)
                    dev.call(
                        lambda parts=parts: found.append([set(t.numpy().tolist()) for t in parts]),
                        "read",
                        [Span.of(t) for t in parts],
                    )
                    dev.record(done[i % 2])
                    dev.record(written)  # of something else, as where sums leave
            dev.wait(done[0])
            dev.wait(done[1])

        for _ in range(3):
            dev.graph(("step",), step)
        dev.synchronize()
        return found

    races = Races()
    results = run(world, link_kinds(world, kind), program, races=races, pause=1e-4)
    assert not races.found, "\n".join(sorted(set(races.found)))
    for rank, found in enumerate(results):
        steps = [[{100 * i + 10 * s + rank} for s in range(world)] for i in range(5)]
        assert found == 3 * steps
