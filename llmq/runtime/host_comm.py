"""Collectives between ranks that are threads of this process and share their memory.

Copies are done by the calling thread; ranks wait for each other at the barrier of their Workers,
which raises Stopped in all of them when one fails. What a GPU would get wrong only sometimes, a
(small) source that is written without a fence or a buffer that is used again too early, is an error
here.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from llmq.runtime.comm import Comm, CommOptions, allocate, part, same_memory, storages
from llmq.runtime.host_device import HostDevice
from llmq.runtime.tensor import Storage, Tensor
from llmq.runtime.workers import Workers

CHECKED_BYTES = 1 << 20  # larger sources are not checked, which takes time; tests have none


def connect_host(devices: Sequence[HostDevice], options: CommOptions, workers: Workers) -> None:
    """Give each device its HostComm."""
    memories = [storages(dev) for dev in devices]
    for dev in devices:
        allocate(dev, options)
        dev.comm = HostComm(dev.rank, memories, workers)


class HostComm(Comm):
    """One rank's end. Sums are in rank order, in F32, rounded once."""

    def __init__(self, rank: int, memories: list[dict[str, Storage]], workers: Workers):
        """memories: all ranks' storages by place."""
        super().__init__(rank, len(memories))
        self._memories = memories
        self._workers = workers
        self._sources: dict[tuple, _Source] = {}
        self._unpulled: set[tuple] = set()

    def _peer(self, rank: int, tensor: Tensor) -> np.ndarray:
        """A peer's tensor: its bytes, in place."""
        rank %= self.world_size
        data = self._memories[rank][tensor.storage.place].bytes
        return data[tensor.offset : tensor.offset + tensor.nbytes]

    def _all_gather(self, dst: Tensor, src: Tensor) -> None:
        own = part(dst, self.rank, self.world_size)
        in_place = same_memory(own, src)
        if src.nbytes <= CHECKED_BYTES:
            self._publish(src)
        for k in range(1 if in_place else 0, self.world_size):
            piece = part(dst, self.rank + k, self.world_size)
            self._peer(self.rank, piece)[:] = self._peer(self.rank + k, piece if in_place else src)

    def _publish(self, src: Tensor) -> None:
        key = (*_key(src), src.nbytes)
        if key not in self._sources:
            self._sources[key] = _Source(src, self._peer(self.rank, src))
        self._sources[key].published = True

    def _reduce_scatter(self, buffer: Tensor) -> None:
        own = part(buffer, self.rank, self.world_size)
        numpy = buffer.dtype.numpy
        self._workers.barrier()
        total = self._peer(0, own).view(numpy).astype(np.float32)
        with np.errstate(all="ignore"):  # a diverging run is reported by the trainer
            for rank in range(1, self.world_size):
                total += self._peer(rank, own).view(numpy)
        self._workers.barrier()
        self._peer(self.rank, buffer).fill(0xFF)  # undefined: NaN
        self._peer(self.rank, own).view(numpy)[:] = total.astype(numpy)

    def _all_to_all(self, buffer: Tensor, targets: list[Tensor]) -> None:
        if _key(buffer) in self._unpulled:
            raise RuntimeError(f"all_to_all: wait_pulled was not called on {buffer!r}")
        self._unpulled.add(_key(buffer))
        self._workers.barrier()
        for k in range(1, self.world_size):
            pulled = self._peer(self.rank - k, targets[0])
            self._peer(self.rank, targets[k])[:] = pulled
            self._workers.barrier()

    def _wait_pulled(self, buffer: Tensor) -> None:
        self._unpulled.discard(_key(buffer))

    def _fence(self, name: str) -> None:
        for source in self._sources.values():
            source.check(name)
        self._workers.barrier()
        for source in self._sources.values():
            source.fenced()

    def abort(self) -> None:
        self._workers.stop()


def _key(tensor: Tensor) -> tuple[str, int]:
    return tensor.storage.place, tensor.offset


class _Source:
    """A source of all_gather, and what it held at the last fence or when it was first gathered."""

    def __init__(self, tensor: Tensor, data: np.ndarray):
        self._tensor = tensor
        self._data = data
        self._checksum = zlib.crc32(data)
        self.published = True

    def check(self, name: str) -> None:
        """Raise RuntimeError if the source was gathered since the last fence and has changed."""
        if self.published and zlib.crc32(self._data) != self._checksum:
            raise RuntimeError(
                f"fence {name}: {self._tensor!r} was both written and gathered since the last "
                "fence; peers may have read either content"
            )

    def fenced(self) -> None:
        """Start over after a fence."""
        self._checksum = zlib.crc32(self._data)
        self.published = False
