"""Collectives by the copy engines: each rank pushes to its peers, without kernels and the host.

Push, not pull: the driver lets the source's GPU do a copy, whichever stream asks for it, and in the
order in which it was asked. Copies that several readers ask of one GPU would wait for each other's
flags in any order, so that three GPUs can wait in a circle.

A reader grants a target, the source writes there and says so. Peers are visited in rotated order,
rank r begins with a neighbour, so that no rank is written by all at once. A peer that cannot be
reached directly reads from the source's staging ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmq.runtime.comm import part, same_memory
from llmq.runtime.device import Device
from llmq.runtime.flags import EMPTY, FULL, PINNED, TARGET, Flags
from llmq.runtime.staged import Piece, Queue, Rings, Staging
from llmq.runtime.tensor import Storage, Tensor

# What is enqueued for sending before the receiving starts: with three operations for each of 8
# ranks, a queue of 1024 holds this many.
SPAN_CHUNKS = 32


@dataclass(frozen=True, slots=True)
class Memories:
    """What ranks know of each other.

    storages: by rank and place. direct[reader][source]: whether source can write to reader's GPU.
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
        self._others = others = [self._peer(k) for k in range(1, self._world_size)]
        self._sources = [p for p in others if memories.direct[self._rank][p]]
        self._readers = [p for p in others if memories.direct[p][self._rank]]
        self._staged_sources = [p for p in others if p not in self._sources]
        self._staged_readers = [p for p in others if p not in self._readers]
        if memories.rings is not None:
            args = (self._rank, queue, self._flags, memories.rings)
            self._staging = Staging(*args, self._staged_readers)
        self._fork = dev.event()
        self._sent = [dev.event() for _ in range(self._world_size)]

    def _peer(self, k: int) -> int:
        return (self._rank + k) % self._world_size

    def _address(self, rank: int, tensor: Tensor) -> int:
        """Where a peer has the same tensor."""
        return self._storages[rank][tensor.storage.place].base + tensor.offset

    def _part(self, buffer: Tensor, index: int) -> Tensor:
        return part(buffer, index, self._world_size)

    # -- direct ----------------------------------------------------------------------------------

    def _grant(self, source: int) -> None:
        """Let the source write to this rank's target."""
        self._queue.write(self._flags.address(TARGET, source, self._rank), EMPTY)

    def _push(self, reader: int, target: Tensor, src: Tensor) -> None:
        """Copy to where the reader has `target`, once it lets us."""
        flag = self._flags.address(TARGET, self._rank, reader)
        self._queue.wait(flag, EMPTY)
        self._queue.copy(self._address(reader, target), src.ptr, src.nbytes)
        self._queue.write(flag, FULL)

    def _arrived(self, source: int) -> None:
        """Wait for what the source has pushed."""
        self._queue.wait(self._flags.address(TARGET, source, self._rank), FULL)

    # -- collectives -----------------------------------------------------------------------------

    def all_gather(self, dst: Tensor, src: Tensor) -> None:
        """dst (W*n,), src (n,)."""
        if src.on_host:
            self._gather_pinned(dst, src)
            return
        own = self._part(dst, self._rank)
        for source in self._sources:
            self._grant(source)
        if self._staged_readers or self._staged_sources:
            self._start_staging(src.nbytes)
        if not same_memory(own, src):
            self._queue.copy(own.ptr, src.ptr, src.nbytes)
        for reader in self._readers:
            self._push(reader, own, src)
        if self._staged_readers or self._staged_sources:
            self._gather_staged(dst, src)
        for source in self._sources:
            self._arrived(source)
        self._queue.pace()

    def _gather_pinned(self, dst: Tensor, src: Tensor) -> None:
        """Each rank reads the others' sources, which are in host memory, where they are."""
        for reader in self._others:
            self._queue.write(self._flags.address(PINNED, self._rank, reader), FULL)
        self._queue.copy(self._part(dst, self._rank).ptr, src.ptr, src.nbytes)
        for source in self._others:
            flag = self._flags.address(PINNED, source, self._rank)
            self._queue.wait(flag, FULL)
            self._queue.copy(self._part(dst, source).ptr, self._address(source, src), src.nbytes)
            self._queue.write(flag, EMPTY)
        for reader in self._others:
            self._queue.wait(self._flags.address(PINNED, self._rank, reader), EMPTY)
        self._queue.pace()

    def all_to_all(self, buffer: Tensor, targets: Sequence[Tensor]) -> None:
        """targets[k]: where round k puts what comes from rank r - k, k from 1 on."""
        if self._staged_readers or self._staged_sources:
            self._start_staging(targets[0].nbytes)
        for k in range(1, self._world_size):
            source, reader = self._peer(-k), self._peer(k)
            self._wait_sent(k - 1)  # that part is this round's target
            if source in self._sources:
                self._grant(source)
            piece = self._part(buffer, reader)
            if reader in self._readers:
                target = targets[1] if k == 1 else self._part(buffer, reader + k - 1)
                self._push(reader, target, piece)
            else:
                self._send(piece, reader, k)
            if source not in self._sources:
                position = (k - 1) * self._staging.chunks(piece.nbytes)
                self._staging.receive([Piece(source, targets[k].ptr, position)], piece.nbytes)
            self._queue.pace()
        self._wait_sent(self._world_size - 1)
        for source in self._sources:
            self._arrived(source)
        self._queue.pace()

    # -- staged ----------------------------------------------------------------------------------

    def _start_staging(self, nbytes: int) -> None:
        """The staging stream goes on after all that the current stream has so far."""
        self._dev.record(self._fork)
        with self._dev.on("stage"):
            self._dev.wait(self._fork)
        self._staging.begin(nbytes)

    def _gather_staged(self, dst: Tensor, src: Tensor) -> None:
        """The own source is staged once for all who need it."""
        span = SPAN_CHUNKS * self._staging.chunk
        for start in range(0, src.nbytes, span):
            position = self._staging.chunks(start)
            nbytes = min(span, src.nbytes - start)
            if self._staged_readers:
                with self._dev.on("stage"):
                    self._staging.send(src.ptr + start, nbytes, self._staged_readers, position)
            targets = [(p, self._part(dst, p).ptr + start) for p in self._staged_sources]
            self._staging.receive([Piece(*target, position) for target in targets], nbytes)
            self._queue.pace()
        if self._staged_readers:
            with self._dev.on("stage"):
                self._dev.record(self._sent[0])
            self._dev.wait(self._sent[0])

    def _send(self, piece: Tensor, reader: int, k: int) -> None:
        """Stage what round k sends."""
        with self._dev.on("stage"):
            position = (k - 1) * self._staging.chunks(piece.nbytes)
            self._staging.send(piece.ptr, piece.nbytes, [reader], position)
            self._dev.record(self._sent[k])

    def _wait_sent(self, k: int) -> None:
        """Wait until what round k sends may be overwritten; pushes are in this stream anyway."""
        if k > 0 and self._peer(k) in self._staged_readers:
            self._dev.wait(self._sent[k])
