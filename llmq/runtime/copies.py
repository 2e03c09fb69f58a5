"""Collectives by copies that each rank pulls from its peers, without kernels and without the host.

Peers are visited in rotated order, rank r begins with a neighbour, so that no rank is read by all
at once. A peer that cannot be reached directly is read through its staging ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmq.runtime.comm import part, same_memory
from llmq.runtime.device import Device
from llmq.runtime.flags import READY, TAKEN, Flags
from llmq.runtime.staged import Piece, Queue, Rings, Staging
from llmq.runtime.tensor import Storage, Tensor

SPAN_CHUNKS = 32  # with three operations for each of 8 ranks, a queue of 1024 holds this many


@dataclass(frozen=True, slots=True)
class Memories:
    """What ranks know of each other.

    storages: by rank and place. direct[reader][source]: whether reader can read source's GPU.
    rings: None if every pair is direct.
    """

    storages: Sequence[dict[str, Storage]]
    flags: Flags
    direct: Sequence[Sequence[bool]]
    rings: Rings | None


class Copies:
    """One rank's end; the calls mean what they mean in Comm."""

    def __init__(self, dev: Device, queue: Queue, memories: Memories):
        self._dev = dev
        self._queue = queue
        self._rank, self._world_size = dev.rank, dev.world_size
        self._storages = memories.storages
        self._flags = memories.flags
        self._direct = memories.direct
        self._after = [self._peer(k) for k in range(1, self._world_size)]
        self._readers = [r for r in self._after if not self._direct[r][self._rank]]
        if memories.rings is not None:
            rings = memories.rings
            self._staging = Staging(self._rank, queue, self._flags, rings, self._readers)
            # So much of a source is enqueued before the receiving starts.
            self._span = SPAN_CHUNKS * rings.chunk
        self._fork = dev.event("comm.fork")
        self._sent = [dev.event(f"comm.sent{k}") for k in range(self._world_size)]

    def _peer(self, k: int) -> int:
        return (self._rank + k) % self._world_size

    def _address(self, rank: int, tensor: Tensor) -> int:
        """Where a peer has the same tensor."""
        return self._storages[rank][tensor.storage.place].base + tensor.offset

    def _part(self, buffer: Tensor, index: int) -> Tensor:
        return part(buffer, index, self._world_size)

    def _start_staging(self) -> None:
        """The staging stream goes on after all that the current stream has so far."""
        self._dev.record(self._fork)
        with self._dev.on("stage"):
            self._dev.wait(self._fork)
        self._staging.begin()

    def all_gather(self, dst: Tensor, src: Tensor) -> None:
        """The own source is staged once for all who need it; the next fence waits for that, too."""
        own = self._part(dst, self._rank)
        in_place = same_memory(own, src)
        readers = [] if src.on_host else self._readers
        if readers:
            self._start_staging()
        if not in_place:
            self._queue.copy(own.ptr, src.ptr, src.nbytes)
        pieces: list[Piece] = []
        for source in self._after:
            target = self._part(dst, source)
            if src.on_host or self._direct[self._rank][source]:
                address = self._address(source, target if in_place else src)
                self._queue.copy(target.ptr, address, src.nbytes)
            else:
                pieces.append(Piece(source, target.ptr, 0))
        if readers or pieces:
            self._gather_staged(src, readers, pieces)
        self._queue.pace()

    def _gather_staged(self, src: Tensor, readers: list[int], pieces: list[Piece]) -> None:
        for start in range(0, src.nbytes, self._span):
            position = self._staging.chunks(start)
            nbytes = min(self._span, src.nbytes - start)
            if readers:
                with self._dev.on("stage"):
                    self._staging.send(src.ptr + start, nbytes, readers, position)
            later = [Piece(p.source, p.target + start, position) for p in pieces]
            self._staging.receive(later, nbytes)
            self._queue.pace()

    def all_to_all(self, buffer: Tensor, targets: Sequence[Tensor]) -> None:
        """targets[k]: where round k puts what it pulls from rank r - k, k from 1 on."""
        own = self._part(buffer, self._rank)
        key = ("pull", buffer.storage.place, buffer.offset)
        for reader in self._after:
            if self._direct[reader][self._rank]:
                self._queue.write(self._flags.address(key, self._rank, reader), READY)
        if self._readers:
            self._start_staging()
        for k in range(1, self._world_size):
            if self._readers:
                self._send_part(buffer, k)
            source = self._peer(-k)
            if k > 1:  # the target is the part that rank r + k - 1 has pulled in the round before
                self._wait_taken(key, k - 1)
            if self._direct[self._rank][source]:
                flag = self._flags.address(key, source, self._rank)
                self._queue.wait(flag, READY)
                self._queue.copy(targets[k].ptr, self._address(source, own), own.nbytes)
                self._queue.write(flag, TAKEN)
            else:
                position = (k - 1) * self._staging.chunks(own.nbytes)
                self._staging.receive([Piece(source, targets[k].ptr, position)], own.nbytes)
            self._queue.pace()
        if self._readers:
            self._dev.wait(self._sent[-1])

    def _send_part(self, buffer: Tensor, k: int) -> None:
        """Stage the part of rank r + k if it cannot pull it; in any case event k is recorded."""
        reader = self._peer(k)
        piece = self._part(buffer, reader)
        with self._dev.on("stage"):
            if reader in self._readers:
                position = (k - 1) * self._staging.chunks(piece.nbytes)
                self._staging.send(piece.ptr, piece.nbytes, [reader], position)
            self._dev.record(self._sent[k])

    def _wait_taken(self, key: tuple, k: int) -> None:
        """Wait until rank r + k has pulled its part, or until that part is in the ring."""
        reader = self._peer(k)
        if self._direct[reader][self._rank]:
            self._queue.wait(self._flags.address(key, self._rank, reader), TAKEN)
        else:
            self._dev.wait(self._sent[k])

    def wait_pulled(self, buffer: Tensor) -> None:
        """Only the part of the last round: all_to_all itself has waited for the others."""
        last = self._peer(-1)
        if self._direct[last][self._rank]:
            key = ("pull", buffer.storage.place, buffer.offset)
            self._queue.wait(self._flags.address(key, self._rank, last), TAKEN)

    def fence(self, name: str) -> None:
        """Tell every peer, then hear from every peer."""
        key = ("fence", name)
        for reader in self._after:
            flag = self._flags.address(key, self._rank, reader)
            self._queue.wait(flag, TAKEN)  # since the last fence of this name
            self._queue.write(flag, READY)
        for source in self._after:
            flag = self._flags.address(key, source, self._rank)
            self._queue.wait(flag, READY)
            self._queue.write(flag, TAKEN)
        self._queue.pace()
