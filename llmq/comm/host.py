"""Collectives between ranks on the CPU: threads that share memory, in one or several processes.

The calling thread does the copying. Ranks of a process wait for each other at the barrier of their
Workers, which raises Stopped in all ranks if one rank fails. Every rank is in one group along each
axis, and all ranks make the same calls. Therefore a barrier of all ranks also serves as the barrier
of each group.

Data of other processes arrive by MPI. If only one rank needs such data, the rank receives the data
directly into the target. Data that all ranks of a process need are received by one rank, in turn,
and copied by the others. Sums are in rank order, so that the bits do not depend on how ranks are
spread over processes.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from llmq.base.tensor import Storage, Tensor
from llmq.comm.collectives import Comm, join, part, same_memory, storages
from llmq.runtime.device import Event
from llmq.runtime.host_device import HostDevice
from llmq.runtime.workers import Workers
from llmq.runtime.world import World

AHEAD = 2  # number of parts that are being received while one part is added


def connect_host(devices: Sequence[HostDevice], workers: Workers, world: World) -> None:
    """Give each device of this process its collectives, which allocate no buffers. workers: the
    state that the process's ranks share."""
    memories = {dev.mesh.rank: storages(dev) for dev in devices}
    for dev in devices:
        join(dev, partial(HostComm, dev, memories, workers, world))


class HostComm(Comm):
    """One rank's end of the collectives along an axis. Sums are computed in F32 and rounded once.
    Methods number ranks by their places in the group."""

    def __init__(
        self,
        dev: HostDevice,
        memories: Mapping[int, dict[str, Storage]],
        workers: Workers,
        world: World,
        axis: str,
    ):
        """memories: for each rank of this process, its storages by place."""
        super().__init__(dev, axis)
        self._memories, self._workers, self._world = memories, workers, world
        self._members: dict[int, list[int]] = {}  # by process: the process's ranks in the group
        for place, rank in enumerate(self.ranks):
            self._members.setdefault(world.processes[rank], []).append(place)
        self._local = self._members[world.index]
        self._remote = [place for place in range(self.size) if place not in self._local]
        self._others = [process for process in self._members if process != world.index]

    def _peer(self, place: int, tensor: Tensor) -> np.ndarray:
        """Return the bytes of the peer's tensor at the offset of `tensor`, as a view; the peer is
        in this process."""
        data = self._memories[self.ranks[place]][tensor.storage.place].bytes
        return data[tensor.offset : tensor.offset + tensor.nbytes]

    def _number(self, source: int, target: int) -> int:
        return self.ranks[source] * self._world.size + self.ranks[target]

    def _process(self, place: int) -> int:
        return self._world.processes[self.ranks[place]]

    def _reader(self, source: int, process: int) -> int:
        """Return the rank that receives the source's data for all ranks of a process."""
        members = self._members[process]
        return members[source % len(members)]

    def _send(self, data: np.ndarray, target: int) -> list:
        sends = [(self._process(target), self._number(self.rank, target), data)]
        return self._world.mpi.begin(sends=sends)

    def _receive(self, data: np.ndarray, source: int) -> list:
        receives = [(self._process(source), self._number(source, self.rank), data)]
        return self._world.mpi.begin(receives=receives)

    def _finish(self, requests: list, peer: int | None = None) -> None:
        """Wait until the MPI requests have completed. peer: the rank that all requests concern;
        None for several ranks."""
        if requests:
            self.waits_for = "others" if peer is None else self._world.name(self.ranks[peer])
            self._world.mpi.finish(requests, self._workers.check)
            self.waits_for = None

    def _barrier(self) -> None:
        self.waits_for = "others"
        self._workers.barrier()
        self.waits_for = None

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        process, own = self._world.index, part(dst, self.rank, self.size)
        in_place = same_memory(own, src)
        self._barrier()  # after this barrier, no rank's memory is being read
        receives = {
            r: self._receive(self._peer(self.rank, part(dst, r, self.size)), r)
            for r in self._remote
            if self._reader(r, process) == self.rank
        }
        sent = self._peer(self.rank, src if mirror is None else mirror)
        sends = [q for p in self._others for q in self._send(sent, self._reader(self.rank, p))]
        for rank in self._local:
            piece = part(dst, rank, self.size)
            if rank != self.rank or not in_place:
                source = (piece if in_place else src) if mirror is None else mirror
                self._peer(self.rank, piece)[:] = self._peer(rank, source)
        for rank, requests in receives.items():
            self._finish(requests, rank)
        self._finish(sends)
        self._barrier()
        for rank in self._remote:
            if rank not in receives:
                piece = part(dst, rank, self.size)
                self._peer(self.rank, piece)[:] = self._peer(self._reader(rank, process), piece)
        if self._remote:
            self._barrier()

    def _reduce_scatter(self, buffer: Tensor) -> None:
        own = part(buffer, self.rank, self.size)
        sends = []
        for rank in self._remote:
            sends += self._send(self._peer(self.rank, part(buffer, rank, self.size)), rank)
        total = self._sum(own, sends)
        self._peer(self.rank, buffer).fill(0xFF)  # makes undefined parts NaN
        self._peer(self.rank, own).view(buffer.dtype.numpy)[:] = total

    def _all_reduce(self, buffer: Tensor) -> None:
        own = self._peer(self.rank, buffer)
        sends = [request for rank in self._remote for request in self._send(own, rank)]
        own.view(buffer.dtype.numpy)[:] = self._sum(buffer, sends)

    def _sum(self, tensor: Tensor, sends: list) -> np.ndarray:
        """Return the sum of all ranks' tensors, once this rank's sends have been read."""
        numpy = tensor.dtype.numpy
        self._barrier()
        pending: deque[tuple[list, np.ndarray]] = deque()
        left = iter(self._remote)

        def receive() -> None:
            rank = next(left, None)
            if rank is not None:
                data = np.empty(tensor.nbytes, np.uint8)
                pending.append((self._receive(data, rank), data))

        for _ in range(AHEAD):
            receive()
        total: np.ndarray | None = None
        with np.errstate(all="ignore"):  # the trainer reports a diverging run
            for rank in range(self.size):
                if rank in self._local:
                    data = self._peer(rank, tensor)
                else:
                    requests, data = pending.popleft()
                    self._finish(requests, rank)
                    receive()
                if total is None:
                    total = data.view(numpy).astype(np.float32)
                else:
                    total += data.view(numpy)
            total = total.astype(numpy)
        self._finish(sends)
        self._barrier()
        return total

    def _all_to_all(
        self, buffer: Tensor, targets: list[Tensor], written: Event | None, out: Tensor | None
    ) -> None:
        own = part(buffer, self.rank, self.size)
        self._barrier()
        for k in range(1, self.size):
            source, target = (self.rank - k) % self.size, (self.rank + k) % self.size
            place, requests = self._peer(self.rank, targets[k]), []
            if source not in self._local:
                requests += self._receive(place, source)
            if target not in self._local:
                requests += self._send(
                    self._peer(self.rank, part(buffer, target, self.size)), target
                )
            if source in self._local:
                place[:] = self._peer(source, own)
            self._finish(requests, source)
            self._barrier()
