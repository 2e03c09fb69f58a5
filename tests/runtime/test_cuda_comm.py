"""Connecting GPUs, on fake CUDA bindings: probing, links, NCCL's arguments, stream memory calls."""

import ctypes
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.errors import ConfigError, LlmqError
from llmq.comm import cuda, nccl
from llmq.comm.collectives import part
from llmq.comm.connect import connect
from llmq.comm.links import ALREADY_ENABLED, Link, Measured, choose, probe
from llmq.comm.options import EMPTY, FULL, CommOptions
from llmq.options.options_io import make_config
from llmq.plan.checks import check_options
from llmq.runtime import cuda_api
from llmq.runtime import machine as machines
from llmq.runtime.cuda_device import CudaDevice
from llmq.runtime.device import MemorySizes
from llmq.runtime.mesh import Mesh
from llmq.runtime.workers import Stopped, Workers
from llmq.runtime.world import World
from tests.harness import GPU_SPEC
from tests.runtime.fake_cuda import CudaError, FakeApi, FakeStatus

SIZES = MemorySizes(device=1 << 16, stack=1 << 12, pinned=1 << 18)
COPIES = CommOptions(memcpy_all_gather=True, all_to_all_reduce=True, memcpy_send_recv=True)
N = 16


class Machine:
    """The part that several fake GPUs have beyond one; mixed into FakeApi().runtime.

    speeds: GB/s by (GPU of dst, GPU of src), None standing for the host. damaged, unreachable:
    (reader, source) pairs.
    """

    def __init__(self, api, gpus=2):
        self.api, runtime = api, api.runtime
        runtime.devices = gpus
        self.runtime, self.current, self.now = runtime, 0, 0.0
        self.owners: dict[int, int] = {}
        self.speeds, self.damaged, self.unreachable, self.enabled = {}, set(), set(), set()
        self.times: dict[int, float] = {}
        copy = runtime.memcpyAsync

        def take(size, malloc=runtime.malloc):
            address = malloc(size)
            self.owners[address] = self.current
            return address

        def free(address, free=runtime.free):
            self.owners.pop(address, None)
            free(address)

        def memcpy(dst, src, size, kind, stream):
            pair = self.owners.get(dst), self.owners.get(src)
            self.now += size / self.speeds.get(pair, 20.0) / 1e6
            copy(dst, src, size, kind, stream)
            if pair in self.damaged:
                ctypes.memset(dst, 0xA5, 8)

        def enable(source):
            if (self.current, source) in self.enabled:
                error = CudaError("cudaErrorPeerAccessAlreadyEnabled")
                error.status = ALREADY_ENABLED
                raise error
            self.enabled.add((self.current, source))

        runtime.malloc, runtime.free, runtime.memcpyAsync = take, free, memcpy
        runtime.setDevice = lambda index: setattr(self, "current", index)
        runtime.getDevice = lambda: self.current
        runtime.deviceCanAccessPeer = lambda s, r: (r, s) not in self.unreachable
        runtime.deviceEnablePeerAccess = enable

        def handle(flags):
            new = runtime._handle()
            self.owners[new] = self.current
            return new

        def record(event, stream):
            if self.owners[event] != self.owners[stream]:
                raise CudaError("cudaErrorInvalidResourceHandle: event of another GPU")
            self.times[event] = self.now

        runtime.streamCreateWithFlags = runtime.eventCreateWithFlags = handle
        runtime.eventCreate, runtime.eventRecord = lambda: handle(0), record
        runtime.eventElapsedTime = lambda start, stop: self.times[stop] - self.times[start]


@pytest.fixture
def machine(monkeypatch):
    api = FakeApi()
    monkeypatch.setattr(cuda_api, "load", lambda: api)
    return Machine(api)


def kinds(table):
    return [[link and link.kind for link in row] for row in table.links]


# -- probing --


def test_probe_finds_working_links(machine):
    machine.speeds = {(0, 1): 50.0, (1, 0): 30.0}
    table = probe(machine.runtime, [0, 1], "auto")
    assert kinds(table) == [[None, "peer"], ["peer", None]]
    assert [table.links[0][1].speed, table.links[1][0].speed] == pytest.approx([50.0, 30.0])
    assert machine.enabled == {(0, 1), (1, 0)}
    assert not machine.runtime.buffers and not machine.runtime.live  # all given back
    assert kinds(probe(machine.runtime, [0, 1], "auto")) == kinds(table)  # already enabled


def test_probe_finds_pairs_that_do_not_work(machine):
    machine.runtime.devices = 4
    machine.speeds = {(1, 0): 5.0, (None, 2): 12.0, (3, None): 8.0}  # (dst, src)
    machine.damaged, machine.unreachable = {(0, 1)}, {(3, 2)}
    table = probe(machine.runtime, [0, 1, 2, 3], "auto")
    assert table.links[0][1] == Link(
        kind="staged", speed=pytest.approx(20.0), reason="damaged data"
    )
    assert table.links[1][0].reason == "slow (5.0 GB/s)"
    assert table.links[3][2] == Link(kind="staged", speed=pytest.approx(8.0), reason="no access")
    assert sum(kind == "peer" for row in kinds(table) for kind in row) == 9
    assert table.damaged and not table.direct[1][0] and table.direct[2][3]


def test_probe_without_peer_access(machine):
    table = probe(machine.runtime, [0, 1], "off")
    assert kinds(table) == [[None, "staged"], ["staged", None]]
    assert not machine.enabled and not table.damaged


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("unreachable", "--p2p=on: GPU 1 has no access to the memory of GPU 0; use --p2p=auto"),
        ("damaged", "--p2p=on: copies from GPU 1 to GPU 0 arrive damaged.*--p2p=auto"),
    ],
)
def test_probe_where_peer_access_is_demanded(machine, broken, message):
    machine.speeds = {(0, 1): 1.0}  # slow is no error
    assert kinds(probe(machine.runtime, [0, 1], "on")) == [[None, "peer"], ["peer", None]]
    setattr(machine, broken, {(0, 1)})
    with pytest.raises(LlmqError, match=message):
        probe(machine.runtime, [0, 1], "on")
    assert not machine.runtime.buffers and not machine.runtime.live


def test_other_errors_of_enabling_mean_no_access(machine):
    def refuse(source):
        error = CudaError("cudaErrorTooManyPeers")
        error.status = 711
        raise error

    machine.runtime.deviceEnablePeerAccess = refuse
    assert probe(machine.runtime, [0, 1], "auto").links[0][1].reason == "no access"


@pytest.mark.parametrize(("direct", "kind"), [(10.0, "peer"), (8.1, "peer"), (7.9, "staged")])
def test_a_link_is_direct_unless_staging_is_clearly_faster(direct, kind):
    measured = Measured(access=True, correct=True, direct=direct, staged=10.0)
    assert choose("auto", 0, 1, measured).kind == kind


@pytest.mark.parametrize(("direct", "beside"), [(396.0, True), (20.1, True), (19.9, False)])
def test_a_link_beside_the_bus_is_much_faster_than_the_bus(direct, beside):
    measured = Measured(access=True, correct=True, direct=direct, staged=10.0)
    assert choose("auto", 0, 1, measured).beside_bus == beside
    assert not choose("off", 0, 1, measured).beside_bus


# -- connecting --


class FakeCommunicator:
    """Notes calls."""

    def __init__(self, log, rank):
        self.log, self.rank = log, rank

    def __getattr__(self, name):
        return lambda *args: self.log.append((self.rank, name, *args))


class FakeCommunicators:
    """The class of communicators."""

    def __init__(self, log):
        self.log = log

    def initAll(self, gpus):
        return [FakeCommunicator(self.log, rank) for rank in range(len(gpus))]

    def __call__(self, count, unique, rank):
        self.log.append(("init", count, unique, rank))
        return FakeCommunicator(self.log, rank)


@pytest.fixture
def library(monkeypatch):
    """A fake of cupy.cuda.nccl. log: all calls."""
    log = []
    fake = SimpleNamespace(
        log=log,
        available=True,
        groupStart=lambda: log.append("start"),
        groupEnd=lambda: log.append("end"),
        NcclCommunicator=FakeCommunicators(log),
        get_unique_id=lambda: (1, 2, 3),
    )
    monkeypatch.setattr(nccl, "load", lambda: fake)
    for name in ("NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_MAX_CTAS"):
        monkeypatch.setenv(name, "")  # restored afterwards
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "")
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT")
    return fake


def open_devices(world=2):
    return [CudaDevice(r, SIZES, mesh=Mesh.of(world, r)) for r in range(world)]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr("llmq.comm.options.STAGING_CHUNK", 1 << 10)


def make(dev, n, dtype=F32, place="device"):
    return dev.alloc("x", (n,), dtype, "Weights", place)


@pytest.mark.usefixtures("small_chunks")
def test_copies_need_no_nccl(machine, library):
    devices = open_devices()
    machine.runtime.setDevice(1)
    table = connect(devices, COPIES, Workers(2))
    assert machine.current == 1
    assert kinds(table) == [[None, "peer"], ["peer", None]]
    a, b = devices
    tensors = [(make(dev, 2 * N), make(dev, N)) for dev in devices]
    for dev, (_, src) in zip(devices, tensors, strict=True):
        dev.upload(src, np.full(N, dev.mesh.rank + 1, np.float32))
    b.mesh.group("shard").all_gather(*tensors[1])
    flags = [dev.arenas["pinned"].tensors[0][1].ptr for dev in devices]
    to_b, to_a = flags[1] + 4 * 0, flags[0] + 4 * 1  # in the reader's memory, by source
    assert machine.api.memory_operations == [
        ("write", b.stream, to_b, EMPTY, 0),
        ("wait", b.stream, to_a, EMPTY, cuda.WAIT_AND),
        ("write", b.stream, to_a, FULL, 0),
        ("wait", b.stream, to_b, FULL, cuda.WAIT_AND),
    ]
    a.mesh.group("shard").all_gather(*tensors[0])
    for dev, (dst, _) in zip(devices, tensors, strict=True):
        assert dev.download(dst).tolist() == [1.0] * N + [2.0] * N
    machine.api.memory_status = FakeStatus("CUDA_ERROR_NOT_SUPPORTED", 801)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_NOT_SUPPORTED \(rank 1\)"):
        b.mesh.group("shard").all_gather(*tensors[1])
    for dev in devices:
        dev.close()
    assert library.log == []


@pytest.mark.usefixtures("small_chunks", "library")
def test_each_rank_has_events_of_its_own_gpu(machine):
    """Events belong to the rank's GPU, which is not current in the connecting thread."""
    devices = open_devices()
    connect(devices, replace(COPIES, p2p="off"), Workers(2))
    for dev in devices:
        machine.runtime.setDevice(dev.index)
        dev.mesh.group("shard").all_gather(make(dev, 2 * N), make(dev, N))
    for dev in devices:
        dev.close()


def test_nccl_calls(machine, library):
    machine.runtime.devices = 3
    devices = open_devices(3)
    connect(devices, CommOptions(all_to_all_reduce=True), Workers(3))
    # Every connection exists before the ranks run.
    exchanged = {(e[0], e[5]) for e in library.log if "send" in e}
    assert exchanged == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert {e[1] for e in library.log if e[0] == 0} == {
        "allGather", "reduceScatter", "send", "recv",
    }  # fmt: skip
    library.log.clear()
    dev = devices[1]
    buffer, spare, pinned = make(dev, 3 * N, BF16), make(dev, N, BF16), make(dev, N, BF16, "pinned")
    own, size = part(buffer, 1, 3), 2 * N
    dev.upload(pinned, np.ones(N, BF16.numpy))
    dev.mesh.group("shard").all_gather(buffer, spare)
    dev.mesh.group("shard").all_gather(buffer, own)
    dev.mesh.group("shard").all_gather(buffer, pinned)
    assert dev.download(own).astype(np.float32).tolist() == [1.0] * N
    dev.mesh.group("shard").reduce_scatter(buffer)
    parts = dev.mesh.group("shard").all_to_all(buffer, spare)
    stream = dev.stream
    zero, two = part(buffer, 0, 3).ptr, part(buffer, 2, 3).ptr
    assert library.log == [
        (1, "allGather", spare.ptr, buffer.ptr, size, 0, stream),
        (1, "allGather", own.ptr, buffer.ptr, size, 0, stream),
        (1, "allGather", own.ptr, buffer.ptr, size, 0, stream),
        (1, "reduceScatter", buffer.ptr, own.ptr, N, 9, 0, stream),
        "start",
        (1, "send", two, size, 0, 2, stream),
        (1, "recv", spare.ptr, size, 0, 0, stream),
        "end",
        "start",
        (1, "send", zero, size, 0, 0, stream),
        (1, "recv", two, size, 0, 2, stream),
        "end",
    ]
    assert [t.ptr for t in parts] == [spare.ptr, own.ptr, two]
    assert dev.arenas["pinned"].used == 256  # no flags, no ring
    library.log.clear()
    for dev in devices:
        dev.close()
    assert library.log == [(rank, "destroy") for rank in range(3)]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.usefixtures("small_chunks")
def test_ranks_that_divide_sequences_have_a_communicator_or_flags(machine, library, copies):
    machine.runtime.devices = 4
    devices = [CudaDevice(r, SIZES, mesh=Mesh.of(4, r, context=2)) for r in range(4)]
    connect(devices, COPIES if copies else CommOptions(), Workers(4))
    names = {tensor.name for _, tensor in devices[3].arenas["pinned"].tensors}
    if copies:
        assert library.log == []
        assert {"comm.context_flags", "comm.context_staging"} < names
    else:  # both pairs get ids; each rank sends to its neighbour, by its place in the pair
        first = next(i for i, entry in enumerate(library.log) if "init" in entry)
        log = [e for e in library.log[first:] if "init" in e or "send" in e]
        assert log[:4] == [("init", 2, (1, 2, 3), place) for place in (0, 1, 0, 1)]
        assert [(entry[0], entry[5]) for entry in log[4:]] == [(0, 1), (1, 0)] * 2
        assert names == set()
        library.log.clear()
        x, out = (make(devices[2], 2 * N) for _ in range(2))
        devices[2].mesh.group("context").exchange(out, x)
        size, stream = 4 * N, devices[2].stream
        assert library.log == [
            "start",
            (0, "send", part(x, 1, 2).ptr, size, 0, 1, stream),
            (0, "recv", part(out, 1, 2).ptr, size, 0, 1, stream),
            "end",
        ]
    for dev in devices:
        dev.close()


def test_nccl_of_several_processes(machine, library):
    """One grouped call of each process, with the first one's id; ranks count through."""

    class Second:
        def gather(self, value):
            return [{(0, 1, 2): (7, 8)} if value == {} else False, value]

    devices = [CudaDevice(i, SIZES, mesh=Mesh.of(3, 1 + i)) for i in range(2)]
    world = World((1, 2), ("a", "a"), 1, Second())
    assert connect(devices, CommOptions(), Workers(2), world) is not None
    assert os.environ["NCCL_P2P_DISABLE"] == "1", "one process cannot, so none does"
    assert library.log[:4] == ["start", ("init", 3, (7, 8), 1), ("init", 3, (7, 8), 2), "end"]
    assert {e[1] for e in library.log[4:] if e[0] in (1, 2)} == {"allGather", "reduceScatter"}
    library.log.clear()
    buffer = make(devices[1], 3 * N)
    devices[1].mesh.group("shard").reduce_scatter(buffer)
    own = part(buffer, 2, 3)
    assert library.log == [
        (2, "reduceScatter", buffer.ptr, own.ptr, N, 7, 0, devices[1].stream),
    ]  # fmt: skip
    for dev in devices:
        dev.close()
    assert library.log[1:] == [(1, "destroy"), (2, "destroy")]


@pytest.mark.usefixtures("small_chunks")
def test_nccl_across_machines(machine, library):
    """The second of two machines: copies within, and a communicator for each place across."""

    class Second:
        def gather(self, value):
            return [{(0, 2): (7,), (1, 3): (8,)} if value == {} else True, value]

    devices = [CudaDevice(i, SIZES, mesh=Mesh.of(4, 2 + i, shards=2)) for i in range(2)]
    world = World((2, 2), ("a", "b"), 1, Second())
    connect(devices, CommOptions(memcpy_all_gather=True), Workers(2), world)
    inner = [entry for entry in library.log if entry[1:2] == ("reduceScatter",)]
    assert [entry[0] for entry in inner] == [0, 1], "of the machine's own communicator"
    at = library.log.index(("init", 2, (7,), 1))
    assert library.log[at - 1 : at + 3] == ["start", *(("init", 2, (k,), 1) for k in (7, 8)), "end"]
    assert {e[1] for e in library.log[at + 3 :] if e[0] == 1} == {"allGather", "allReduce"}
    library.log.clear()
    sums, dev = make(devices[1], N), devices[1]
    dev.mesh.group("replica").all_reduce(sums)
    assert dev.last_operation == f"all_reduce {sums.name} across machines"
    assert library.log == [(1, "allReduce", sums.ptr, sums.ptr, N, 7, 0, dev.stream)]
    for dev in devices:
        dev.close()
    assert library.log[1:] == [(k, "destroy") for k in (0, 1, 1, 1)], "both kinds"


@pytest.mark.usefixtures("machine")
def test_a_machine_of_one_gpu(library):
    """A machine of one GPU shards with nobody, and closes its communicator to other machines."""

    class Second:
        def gather(self, value):
            return [{(0, 1): (7,)} if value == {} else True, value]

    dev = CudaDevice(0, SIZES, mesh=Mesh.of(2, 1, shards=1))
    world = World((1, 1), ("a", "b"), 1, Second())
    connect([dev], CommOptions(all_to_all_reduce=True), Workers(1), world)
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"
    library.log.clear()
    whole, own = make(dev, 2 * N), make(dev, N)
    dev.mesh.group().all_gather(whole, own)
    dev.mesh.group("replica").all_reduce(own)
    assert [entry[1] for entry in library.log] == ["allGather", "allReduce"]
    assert library.log[0][2:4] == (part(whole, 1, 2).ptr, whole.ptr)
    library.log.clear()
    dev.close()
    assert library.log == [(1, "destroy")]


def test_copies_do_not_reach_other_processes():
    gpus = machines.Machine(
        kind="cuda", spec=GPU_SPEC, note=None, world=World((1, 1), ("a", "b"), 0)
    )
    config = make_config({"memcpy_all_gather": True, "shard_over": "world"})
    with pytest.raises(ConfigError, match="--memcpy-all-gather: copies reach the GPUs of one proc"):
        check_options(config, gpus)
    check_options(config, replace(gpus, world=World.of(2)))
    config = replace(config, shard_over="machine")
    check_options(config, gpus)
    with pytest.raises(ConfigError, match="--memcpy-all-gather: copies reach the GPUs of one proc"):
        check_options(config, replace(gpus, world=World((2, 2), ("a", "a"), 0)))
    check_options(make_config({"all_to_all_reduce": True}), gpus)


@pytest.mark.parametrize("fails", ["malloc", "groupEnd", "deviceSynchronize"])
def test_connecting_that_fails_gives_back_its_memory(machine, library, monkeypatch, fails):
    devices = open_devices()
    ends = nccl.open_communicators(library, devices, "shard", None)
    held, owner = set(machine.runtime.buffers), library if fails == "groupEnd" else machine.runtime
    work, calls = getattr(owner, fails), []

    def fail_at_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise CudaError("out of memory")
        return work(*args)

    monkeypatch.setattr(owner, fails, fail_at_second)
    with pytest.raises(CudaError, match="out of memory"):
        nccl.establish(library, ends, ("all_gather", "reduce_scatter"))
    assert set(machine.runtime.buffers) == held


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("p2p", "damaged", "disabled"),
    [("auto", False, False), ("on", False, False), ("off", False, True), ("auto", True, True)],
)
def test_nccl_does_not_use_what_we_do_not(machine, library, monkeypatch, p2p, damaged, disabled):
    machine.damaged = {(1, 0)} if damaged else set()
    connect(open_devices(), CommOptions(p2p=p2p), Workers(2))
    assert os.environ["NCCL_P2P_DISABLE"] == ("1" if disabled else "")


@pytest.mark.usefixtures("machine")
def test_stopped_ranks_abort_nccl(library):
    devices, workers = open_devices(), Workers(2)
    connect(devices, CommOptions(), workers)
    library.log.clear()
    workers.stop()
    with pytest.raises(Stopped):
        devices[1].mesh.group("shard").reduce_scatter(make(devices[1], 2 * N))
    deadline = time.monotonic() + 10
    while len(library.log) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sorted(library.log) == [(0, "abort"), (1, "abort")]
    for dev in devices:
        dev.close()
    assert len(library.log) == 2  # an aborted communicator is gone


@pytest.mark.usefixtures("machine")
def test_without_nccl(monkeypatch):
    cuda = SimpleNamespace(nccl=SimpleNamespace(available=False))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    with pytest.raises(LlmqError, match="NCCL cannot be loaded: install nvidia-nccl-cu12"):
        connect(open_devices(), CommOptions(), Workers(2))
