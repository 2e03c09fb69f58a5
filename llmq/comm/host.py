"""Collectives between ranks that are threads of this process and share their memory.

Copies are done by the calling thread; ranks wait for each other at the barrier of their Workers,
which raises Stopped in all of them when one fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from llmq.base.tensor import Storage, Tensor
from llmq.comm.collectives import Comm, join, part, same_memory, storages
from llmq.runtime.device import Event
from llmq.runtime.host_device import HostDevice
from llmq.runtime.workers import Workers


def connect_host(devices: Sequence[HostDevice], workers: Workers) -> None:
    """Give each device its HostComms, which need no memory of their own."""
    memories = {dev.mesh.rank: storages(dev) for dev in devices}
    for dev in devices:
        join(dev, partial(HostComm, dev, memories, workers))


class HostComm(Comm):
    """One rank's end. Sums are in rank order, in F32, rounded once.

    Every rank is in one group of each kind, and all make the same calls: so a barrier of all
    serves each of these groups.
    """

    def __init__(
        self,
        dev: HostDevice,
        memories: Mapping[int, dict[str, Storage]],
        workers: Workers,
        axis: str,
    ):
        """memories: storages by place, of all ranks of this process."""
        super().__init__(dev, axis)
        self._memories = memories
        self._workers = workers

    def _peer(self, place: int, tensor: Tensor) -> np.ndarray:
        """The tensor of a peer, by its place in the group: its bytes, where they are."""
        rank = self.ranks[place % self.size]
        data = self._memories[rank][tensor.storage.place].bytes
        return data[tensor.offset : tensor.offset + tensor.nbytes]

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        own = part(dst, self.rank, self.size)
        in_place = same_memory(own, src)
        self._workers.barrier()
        for k in range(1 if in_place else 0, self.size):
            piece = part(dst, self.rank + k, self.size)
            source = (piece if in_place else src) if mirror is None else mirror
            self._peer(self.rank, piece)[:] = self._peer(self.rank + k, source)
        self._workers.barrier()

    def _reduce_scatter(self, buffer: Tensor) -> None:
        own = part(buffer, self.rank, self.size)
        total = self._total(own)
        self._peer(self.rank, buffer).fill(0xFF)  # undefined: NaN
        self._peer(self.rank, own).view(buffer.dtype.numpy)[:] = total

    def _all_reduce(self, buffer: Tensor) -> None:
        self._peer(self.rank, buffer).view(buffer.dtype.numpy)[:] = self._total(buffer)

    def _total(self, tensor: Tensor) -> np.ndarray:
        """The sum of what all have in a tensor, which nobody reads any more."""
        numpy = tensor.dtype.numpy
        self._workers.barrier()
        total = self._peer(0, tensor).view(numpy).astype(np.float32)
        with np.errstate(all="ignore"):  # a diverging run is reported by the trainer
            for rank in range(1, self.size):
                total += self._peer(rank, tensor).view(numpy)
            total = total.astype(numpy)
        self._workers.barrier()
        return total

    def _all_to_all(self, buffer: Tensor, targets: list[Tensor], written: Event | None) -> None:
        self._workers.barrier()
        for k in range(1, self.size):
            self._peer(self.rank, targets[k])[:] = self._peer(self.rank - k, targets[0])
            self._workers.barrier()
