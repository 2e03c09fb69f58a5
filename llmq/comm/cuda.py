"""Collectives between GPUs: each operation by NCCL or by copies, as the options say."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from llmq.base.tensor import Tensor
from llmq.comm import nccl
from llmq.comm.collectives import Comm, join, storages
from llmq.comm.copies import Copies, Memories, Rings
from llmq.comm.links import LinkTable, probe
from llmq.comm.nccl import Nccl
from llmq.comm.options import STAGING_CHUNKS, CommMemory, CommOptions, Flags, allocate
from llmq.runtime.cuda_device import CudaDevice
from llmq.runtime.device import Event
from llmq.runtime.workers import Workers
from llmq.runtime.world import World

LOOK_SECONDS = 0.2  # seconds between two checks by the watch thread for stopped ranks
RELEASE_SECONDS = 0.001  # seconds between releases after a failure, as streams still change flags
OF_PARTS = CommOptions(all_to_all_reduce=True, memcpy_send_recv=True)  # of the axis "context"
WAIT_AND = 2  # CU_STREAM_WAIT_VALUE_AND: until (word & value) != 0


class CudaQueue:
    """The current stream of a device as a Queue (copies.py)."""

    def __init__(self, dev: CudaDevice):
        self._dev = dev
        self.copy, self.write = dev.copy_bytes, dev.write_word

    def wait(self, address: int, value: int) -> None:
        self._dev.wait_word(address, value, WAIT_AND)

    def pace(self) -> None:
        """Wait for the stream, unless a graph is being captured. A stream holds about a thousand
        operations. When it is full, the driver blocks the thread and, for peer copies, also threads
        of other ranks that would let the stream go on."""
        if not self._dev.capturing:
            self._dev.synchronize_stream()


def connect_cuda(
    devices: Sequence[CudaDevice], options: CommOptions, workers: Workers, world: World
) -> LinkTable | None:
    """Probe all pairs of GPUs of this process, make the communicators, and give each device its
    CudaComm. Ranks of different processes always use NCCL, because copies cannot reach another
    process's memory. world: the processes of the run, which all call this function. Returns the
    links between GPUs; None with one GPU."""
    mesh, api = devices[0].mesh, devices[0].api
    shards, replicas, context = (mesh.size(axis) for axis in ("shard", "replica", "context"))
    gpus = [dev.index for dev in devices]
    memory = [allocate(dev, options) for dev in devices]
    current = api.getDevice()
    inner: list[Any] = []  # communicators within groups of shards; cross: across the groups
    cross: list[Any] = []
    divided: list[Any] = []  # communicators of ranks that divide sequences
    library = None
    try:
        links = probe(api, gpus, options.p2p)
        if replicas > 1 or (shards > 1 and options.nccl):
            library = nccl.load()
            # Both processes of a pair of ranks decide whether to use NCCL, and must decide alike.
            peer_access = all(world.gather(options.p2p != "off" and not links.damaged))
            several = len(devices) < shards  # a group of shards spans processes
            nccl.set_environment(peer_access, several=several or replicas > 1)
        if shards > 1 and options.nccl:
            inner = nccl.open_communicators(library, devices, "shard", world if several else None)
            pairs = not several or options.all_to_all_reduce or options.matrices
            calls = ("all_gather", "reduce_scatter", *(("all_to_all",) if pairs else ()))
            nccl.establish(library, inner, calls)
        if replicas > 1:
            cross = nccl.open_communicators(library, devices, "replica", world)
            nccl.establish(library, cross, ("all_gather", "all_reduce"))
        if context > 1 and not options.memcpy_send_recv:
            divided = nccl.open_communicators(library, devices, "context", world)
            nccl.establish(library, divided, ("all_to_all",))
        memories = {
            axis: _memories(devices, [of_rank[axis] for of_rank in memory], links)
            for axis, own in memory[0].items()
            if own.flags is not None
        }
        flags = [each.flags for each in memories.values()]
        opened = [end.communicator for end in (*inner, *cross, *divided)]
        watch = Watch(workers, [dev.mesh.index("shard") for dev in devices], flags, opened)
        for place, dev in enumerate(devices):
            api.setDevice(dev.index)  # events belong to the current GPU
            copies = {axis: Copies(dev, CudaQueue(dev), of, axis) for axis, of in memories.items()}
            own, across, parts = (each[place] if each else None for each in (inner, cross, divided))
            ends = {
                "shard": (own, watch, options, copies.get("shard")),
                "replica": (across, watch),
                "context": (parts, watch, OF_PARTS, copies.get("context")),
            }
            join(dev, lambda axis, dev=dev, ends=ends: CudaComm(dev, axis, *ends[axis]))
    finally:
        api.setDevice(current)
    return links if len(devices) > 1 else None


def _memories(
    devices: Sequence[CudaDevice], memory: Sequence[CommMemory], links: LinkTable
) -> Memories:
    rings = None
    if memory[0].staging is not None:
        chunk = memory[0].staging.nbytes // STAGING_CHUNKS
        rings = Rings([m.staging.ptr for m in memory], chunk, STAGING_CHUNKS)
    flags = Flags([m.flags for m in memory])
    places = [storages(dev) for dev in devices]
    return Memories(places, flags, links.direct, links.beside_bus, rings)


class CudaComm(Comm):
    """One rank's end along an axis. Every call raises Stopped once the ranks are stopped."""

    def __init__(
        self,
        dev: CudaDevice,
        axis: str,
        nccl: Nccl | None,
        watch: Watch,
        options: CommOptions | None = None,
        copies: Copies | None = None,
    ):
        """options, copies: given for the axes "shard" and "context", which may use copies in place
        of NCCL; None for the axis "replica", because replicas are on other machines."""
        super().__init__(dev, axis)
        options = options or CommOptions()
        self.exchange_stream = options.exchange_stream
        self._where = " across machines" if axis == "replica" else ""
        self._nccl, self._watch = nccl, watch
        self._copies = copies if options.memcpy_all_gather else None
        self._exchanges = copies if options.all_to_all_reduce and options.memcpy_send_recv else None

    def _begin(self, operation: str) -> None:
        super()._begin(operation + self._where)
        self._watch.workers.check()

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        if self._copies is not None:
            self._copies.all_gather(dst, src, mirror)
        else:
            self._nccl.all_gather(dst, src)

    def _reduce_scatter(self, buffer: Tensor) -> None:
        if self._nccl is None:
            raise RuntimeError("reduce_scatter needs NCCL: these options reduce with all_to_all")
        self._nccl.reduce_scatter(buffer)

    def _all_to_all(
        self, buffer: Tensor, targets: list[Tensor], written: Event | None, out: Tensor | None
    ) -> None:
        if self._exchanges is not None:
            self._exchanges.all_to_all(buffer, targets, written, out)
        else:
            self._nccl.all_to_all(buffer, targets)

    def _all_reduce(self, buffer: Tensor) -> None:
        self._nccl.all_reduce(buffer)

    def close(self) -> None:
        self._watch.close(self._dev.mesh.index("shard"))


class Watch:
    """A thread, shared by the ranks, that ends the GPUs' waits when the ranks are stopped. Without
    this thread, the streams of other ranks would wait forever for a failed rank."""

    def __init__(
        self, workers: Workers, ranks: list[int], flags: list[Flags], communicators: list[Any]
    ):
        """ranks: places along "shard" of this process's ranks. flags: each axis's flags."""
        self.workers = workers
        self._flags = flags
        self._communicators = communicators
        self._open = set(ranks)
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="comm watch", daemon=True).start()

    def _run(self) -> None:
        while not self.workers.stopped.wait(LOOK_SECONDS):
            if not self._open:
                return
        for communicator in self._communicators:
            # The communicator's kernels end at once, but `abort` returns only when its graphs are
            # destroyed.
            threading.Thread(target=communicator.abort, daemon=True).start()
        while self._flags:
            with self._lock:
                if not self._open:
                    return
                for flags in self._flags:
                    flags.release(self._open)
            time.sleep(RELEASE_SECONDS)

    def close(self, rank: int) -> None:
        """Record that the rank's memory is freed. The last rank's call destroys the communicators,
        which no graph uses any more."""
        with self._lock:
            last = self._open == {rank}  # True in one call only
            self._open.discard(rank)
        if last and not self.workers.stopped.is_set():
            for communicator in self._communicators:
                communicator.destroy()
