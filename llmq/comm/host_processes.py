"""Collectives between ranks in several processes, on the CPU: their data travel through MPI.

Ranks of one process share memory, as in host.py. What comes from another process is received by the
rank that needs it, directly into its place; what all ranks of a process need is received by one of
them, in turn, and copied by the others. Sums are in rank order, so that it makes no difference to
any bit how ranks are spread over processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from llmq.base.tensor import Storage, Tensor
from llmq.comm.collectives import part, same_memory, storages
from llmq.comm.host import HostComm
from llmq.runtime.device import Event
from llmq.runtime.host_device import HostDevice
from llmq.runtime.mpi import MpiProcesses
from llmq.runtime.workers import Workers
from llmq.runtime.world import World

AHEAD = 2  # parts of other ranks that are received while one is added


def connect_processes(
    devices: Sequence[HostDevice], workers: Workers, world: World, processes: MpiProcesses
) -> None:
    """Give each device of this process its collectives. workers: of its ranks."""
    memories = {dev.rank: storages(dev) for dev in devices}
    for dev in devices:
        dev.comm = ProcessComm(dev, memories, workers, world, processes)


class ProcessComm(HostComm):
    """One rank's end. memories: storages by place of each rank of this process."""

    def __init__(
        self,
        dev: HostDevice,
        memories: dict[int, dict[str, Storage]],
        workers: Workers,
        world: World,
        processes: MpiProcesses,
    ):
        super().__init__(dev, memories, workers)
        self._world, self._processes = world, processes
        self._remote = [r for r in range(world.size) if r not in world.local]
        self._others = [p for p in range(len(world.counts)) if p != world.index]

    def _number(self, source: int, target: int) -> int:
        """Which data it is: what one rank sends to another one."""
        return source * self.world_size + target

    def _reader(self, source: int, process: int) -> int:
        """The rank of a process that receives what a rank sends to all."""
        world = self._world
        return sum(world.counts[:process]) + source % world.counts[process]

    def _send(self, data: np.ndarray, target: int) -> list:
        to = self._world.processes[target]
        return self._processes.begin(sends=[(to, self._number(self.rank, target), data)])

    def _receive(self, data: np.ndarray, source: int, target: int) -> list:
        process = self._world.processes[source]
        return self._processes.begin(receives=[(process, self._number(source, target), data)])

    def _finish(self, requests: list, peer: int | None = None) -> None:
        """peer: the rank that is waited for, if it is a single one."""
        self.waits_for = "others" if peer is None else self._world.name(peer)
        self._processes.finish(requests, self._workers.check)
        self.waits_for = None

    def _barrier(self) -> None:
        """Of the ranks in this process."""
        self.waits_for = "others"
        self._workers.barrier()
        self.waits_for = None

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        world, own = self._world, part(dst, self.rank, self.world_size)
        in_place = same_memory(own, src)
        self._barrier()  # of no rank anything is read any more
        mine = [r for r in self._remote if self._reader(r, world.index) == self.rank]
        receives = {
            r: self._receive(self._peer(self.rank, part(dst, r, self.world_size)), r, self.rank)
            for r in mine
        }
        sent = self._peer(self.rank, src if mirror is None else mirror)
        sends = [q for p in self._others for q in self._send(sent, self._reader(self.rank, p))]
        for rank in world.local:
            piece = part(dst, rank, self.world_size)
            if rank != self.rank or not in_place:
                source = (piece if in_place else src) if mirror is None else mirror
                self._peer(self.rank, piece)[:] = self._peer(rank, source)
        for rank, requests in receives.items():
            self._finish(requests, rank)
        self._finish(sends)
        self._barrier()
        for rank in self._remote:
            if rank not in receives:
                piece, reader = part(dst, rank, self.world_size), self._reader(rank, world.index)
                self._peer(self.rank, piece)[:] = self._peer(reader, piece)
        self._barrier()

    def _reduce_scatter(self, buffer: Tensor) -> None:
        own = part(buffer, self.rank, self.world_size)
        numpy = buffer.dtype.numpy
        sends = []
        for rank in self._remote:
            sends += self._send(self._peer(self.rank, part(buffer, rank, self.world_size)), rank)
        self._barrier()
        coming: deque[tuple[list, np.ndarray]] = deque()
        left = iter(self._remote)

        def receive() -> None:
            rank = next(left, None)
            if rank is not None:
                data = np.empty(own.nbytes, np.uint8)
                coming.append((self._receive(data, rank, self.rank), data))

        for _ in range(AHEAD):
            receive()
        total: np.ndarray | None = None
        with np.errstate(all="ignore"):  # a diverging run is reported by the trainer
            for rank in range(self.world_size):
                if rank in self._world.local:
                    data = self._peer(rank, own)
                else:
                    requests, data = coming.popleft()
                    self._finish(requests, rank)
                    receive()
                if total is None:
                    total = data.view(numpy).astype(np.float32)
                else:
                    total += data.view(numpy)
        self._finish(sends)
        self._barrier()
        self._peer(self.rank, buffer).fill(0xFF)  # undefined: NaN
        self._peer(self.rank, own).view(numpy)[:] = total.astype(numpy)

    def _all_to_all(self, buffer: Tensor, targets: list[Tensor], written: Event | None) -> None:
        world = self.world_size
        self._barrier()
        for k in range(1, world):
            source, target = (self.rank - k) % world, (self.rank + k) % world
            place, requests = self._peer(self.rank, targets[k]), []
            if source not in self._world.local:
                requests += self._receive(place, source, self.rank)
            if target not in self._world.local:
                requests += self._send(self._peer(self.rank, part(buffer, target, world)), target)
            if source in self._world.local:
                place[:] = self._peer(source, targets[0])
            self._finish(requests, source)
            self._barrier()
