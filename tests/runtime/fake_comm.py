"""Collectives of devices whose streams are threads: the real copies, and NCCL's rules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from llmq.base.tensor import Storage, Tensor
from llmq.comm.collectives import join, part, same_memory, storages
from llmq.comm.connect import connect
from llmq.comm.copies import Copies, Memories, Rings
from llmq.comm.cuda import CudaComm, Watch
from llmq.comm.options import STAGING_CHUNKS, CommOptions, Flags, allocate
from llmq.runtime.device import Event
from llmq.runtime.workers import Workers
from tests.runtime.fake_streams import PATIENCE, StreamDevice
from tests.runtime.races import Span


class StreamQueue:
    """The copies and flags of a device's current stream.

    deaf: waits for no flag. paced: the host waits wherever it may, as it does outside of graphs.
    """

    def __init__(
        self,
        dev: StreamDevice,
        devices: Sequence[StreamDevice],
        deaf: bool = False,
        paced: bool = False,
    ):
        self._copy = dev.copy_bytes
        memories = [storages(other) for other in devices if other is not dev]
        self._foreign = [
            Span(m[place].base, m[place].base + m[place].bytes.size)
            for m in memories
            for place in ("device", "stack")
        ]
        self.wait = (lambda address, value: None) if deaf else dev.wait_word
        self.write = partial(dev.write_word, flips=not deaf)
        self.pace = dev.synchronize_stream if paced else lambda: None

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy this GPU's memory or pinned memory."""
        foreign = any(span.start <= src < span.stop for span in self._foreign)
        assert not foreign, f"the copy of {nbytes} bytes to {dst:#x} reads another GPU"
        self._copy(dst, src, nbytes)


class StreamComm(CudaComm):
    """Finds calls of one rank that nothing orders, as if each wrote to the same place.

    Where exchanges may run beside gathers from host memory, these have one place and exchanges
    another; other gathers have both.
    """

    def __init__(self, dev: StreamDevice, *args: Any):
        super().__init__(dev, *args)
        self._places = np.empty(32, np.uint8)
        dev.races.watch(Storage("comm", self._places.ctypes.data, self._places))

    def _note(self, *, gathers: bool = True, exchanges: bool = True) -> None:
        one = self.exchange_stream == "comm"
        start = self._places.ctypes.data
        first = start if one or gathers else start + 16
        last = start + 32 if one or exchanges else start + 16
        self._dev.call(lambda: None, self._dev.last_operation, writes=[Span(first, last)])

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        self._note(exchanges=not src.on_host and mirror is None)
        super()._all_gather(dst, src, mirror)

    def _reduce_scatter(self, buffer: Tensor) -> None:
        self._note()
        super()._reduce_scatter(buffer)

    def _all_to_all(
        self, buffer: Tensor, targets: list[Tensor], written: Event | None, out: Tensor | None
    ) -> None:
        self._note(gathers=False)
        super()._all_to_all(buffer, targets, written, out)


class StreamNccl:
    """Like llmq.comm.nccl.Nccl: a call waits for the peers that it gets something from, and ends
    when its sources have been read."""

    def __init__(self, dev: StreamDevice, ranks: list[StreamNccl], barrier: threading.Barrier):
        """ranks: of all ranks, to which this one is added in the order of ranks."""
        self._dev, self._ranks, self._barrier = dev, ranks, barrier
        self._told: np.ndarray | None = None
        ranks.append(self)

    def _peer(self, index: int, tensor: Tensor) -> np.ndarray:
        """A peer's tensor: its bytes, in place."""
        place = storages(self._ranks[index % len(self._ranks)]._dev)[tensor.storage.place]
        return place.bytes[tensor.offset : tensor.offset + tensor.nbytes]

    def _part(self, buffer: Tensor, index: int) -> Tensor:
        return part(buffer, index, len(self._ranks))

    def _enqueue(
        self, name: str, src: list[Tensor], dst: list[Tensor], sources: list[int], work: Callable
    ) -> None:
        """work() between two meetings of all ranks; this one gets something from `sources`."""
        dev, index = self._dev, self._dev.queue_id(self._dev.stream_name)

        def run() -> None:
            self._told = dev.races.told(index)
            self._barrier.wait(PATIENCE)
            for source in sources:
                dev.races.learn(index, self._ranks[source % len(self._ranks)]._told)
            work()
            self._barrier.wait(PATIENCE)

        dev.call(run, f"NCCL {name}", [Span.of(t) for t in src], [Span.of(t) for t in dst])

    def all_gather(self, dst: Tensor, src: Tensor) -> None:
        def work() -> None:
            for rank in written:
                target = self._part(dst, rank)
                source = self._part(dst, rank) if in_place else src
                self._peer(self._dev.mesh.rank, target)[:] = self._peer(rank, source)

        in_place = same_memory(self._part(dst, self._dev.mesh.rank), src)
        # In place the own part is what NCCL sends, and peers may read it until the call ends: so it
        # keeps its bytes (NVLS writes the same ones once more), and is no race for who reads it
        # meanwhile, as a copy for a checkpoint does.
        written = [rank for rank in self._all if not (in_place and rank == self._dev.mesh.rank)]
        parts = [self._part(dst, rank) for rank in written]
        self._enqueue(f"all_gather {dst.name}", [src], parts, self._all, work)

    def reduce_scatter(self, buffer: Tensor) -> None:
        own, numpy = self._part(buffer, self._dev.mesh.rank), buffer.dtype.numpy

        def work() -> None:
            parts = [self._peer(r, own).view(numpy) for r in range(len(self._ranks))]
            total = sum(p.astype(np.float32) for p in parts)
            self._barrier.wait(PATIENCE)
            self._peer(self._dev.mesh.rank, buffer).fill(0xFF)  # undefined: NaN
            own.numpy()[:] = total.astype(numpy)

        self._enqueue(f"reduce_scatter {buffer.name}", [buffer], [buffer], self._all, work)

    @property
    def _all(self) -> list[int]:
        return list(range(len(self._ranks)))

    def all_to_all(self, buffer: Tensor, targets: Sequence[Tensor]) -> None:
        rank = self._dev.mesh.rank
        for k in range(1, len(self._ranks)):

            def work(k: int = k) -> None:
                self._peer(rank, targets[k])[:] = self._peer(rank - k, self._part(buffer, rank))

            args = ([self._part(buffer, rank + k)], [targets[k]], [rank - k])
            self._enqueue(f"all_to_all {buffer.name} {k}", *args, work)


def link_kinds(world: int, kind: str) -> list[list[str]]:
    """kinds[reader][source], all the same: "staged", "peer", or "beside" (a peer beside the bus);
    or a third of each for "mixed"."""
    kinds = [kind] if kind != "mixed" else ["staged", "peer", "beside"]
    return np.random.default_rng(world).choice(kinds, (world, world)).tolist()


def connect_streams(
    devices: Sequence[StreamDevice],
    options: CommOptions,
    workers: Workers,
    *,
    kinds: list[list[str]],
    deaf: bool = False,
    paced: bool = False,
    **of_copies: int,
) -> Flags | None:
    """Connect as connect_cuda does it; returns the flags. of_copies: options of Copies."""
    if len(devices) == 1:
        connect(devices, options)
        return None
    memory = [allocate(dev, options) for dev in devices]
    memories: dict[str, Memories] = {}
    for axis in (axis for axis, own in memory[0].items() if own.flags is not None):
        of_ranks = [own[axis] for own in memory]
        chunk = of_ranks[0].staging.nbytes // STAGING_CHUNKS
        rings = Rings([m.staging.ptr for m in of_ranks], chunk, STAGING_CHUNKS)
        flags = Flags([m.flags for m in of_ranks])
        direct = [[kind != "staged" for kind in row] for row in kinds]
        beside_bus = [[kind == "beside" for kind in row] for row in kinds]
        places = [storages(dev) for dev in devices]
        memories[axis] = Memories(places, flags, direct, beside_bus, rings)
    flags = [each.flags for each in memories.values()]
    watch = Watch(workers, list(range(len(devices))), flags, [])
    ranks, barrier = [], threading.Barrier(len(devices))
    for dev in devices:
        queue = StreamQueue(dev, devices, deaf, paced)
        copies = {axis: Copies(dev, queue, m, axis, **of_copies) for axis, m in memories.items()}
        nccl = StreamNccl(dev, ranks, barrier) if options.nccl else None
        ends = {
            axis: StreamComm(dev, axis, nccl, watch, options, copies.get(axis))
            for axis in ("shard", "context")
        }
        join(dev, ends.__getitem__)
    return flags[0] if flags else None
