"""Collectives by the copy engines: ranks push to their peers, without kernels or the host.

Why ranks push and do not pull: the source's GPU executes a copy, whichever stream requests the
copy, in the order of the requests. If several readers pulled from one GPU, their copies would wait
for each other's flags in any order, and three GPUs could wait in a circle.

The source of a transfer is the rank that sends; the reader is the rank that receives. A reader sets
a flag when its target may be written; the source writes the target and sets the flag back. A rank
visits its peers in rotated order, starting with a neighbour, so that not all ranks write to one
rank at once. A peer that the source cannot write to directly reads from the source's staging ring.
If a source is in pinned memory, all peers read it there, except peers with a link to the source's
rank beside the bus: for such peers the rank loads the source once and pushes the data. If a source
has a mirror in pinned memory, peers without a direct connection read the mirror.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llmq.base.tensor import Storage, Tensor
from llmq.comm.collectives import part, same_memory
from llmq.comm.options import EMPTY, EXCHANGED, FULL, PINNED, RING, TARGET, Flags
from llmq.runtime.device import Device, Event

# -- Transfers between GPUs without direct access, through rings of buffers in pinned memory Each
# rank has one ring. The rank copies a chunk into the next buffer and marks the buffer full for its
# readers. Each reader copies the chunk to its GPU and marks the buffer empty. Sending runs on the
# stage stream, so that both directions of the bus are busy, and chunks of all sources are received
# in turn. A chunk's position within one collective determines its buffer. Sender and reader
# therefore agree without messages, and a graph may be replayed.


class Queue(Protocol):
    """Operations of a rank's current stream on addresses in any rank's memory."""

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy from this GPU to any GPU that it can write to, or from pinned memory to this GPU."""

    def wait(self, address: int, value: int) -> None:
        """Wait until the 32-bit word at the address and value have a bit in common."""

    def write(self, address: int, value: int) -> None:
        """Write the 32-bit word at the address; a reader of the word also sees all earlier
        writes."""

    def pace(self) -> None:
        """Let the host wait for the stream if its queue is nearly full; callers pace after every
        few operations."""


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings of all ranks. addresses: each ring's address, by rank. A ring has `count` buffers
    of `chunk` bytes."""

    addresses: Sequence[int]
    chunk: int
    count: int


class Incoming(NamedTuple):
    """Data to receive from one source. target: address that the data are written to. position: the
    first chunk's position in the source's ring."""

    source: int
    target: int
    position: int


class Staging:
    """One rank's sending and receiving through rings."""

    def __init__(self, rank: int, queue: Queue, flags: Flags, rings: Rings, readers: list[int]):
        """readers: the ranks that may read this rank's ring."""
        self._rank = rank
        self._queue = queue
        self._flags = flags
        self._rings = rings
        self._readers = readers
        self._last: dict[int, list[int]] = {}
        self.chunk = rings.chunk

    def chunks(self, nbytes: int) -> int:
        """Return the number of ring positions that `nbytes` take."""
        return -(-nbytes // self.chunk)

    def begin(self, nbytes: int) -> None:
        """Start a new collective, at position 0. nbytes: bytes from one source to one reader, in 8
        chunks if the buffers' size allows. Nothing overlaps the first and the last chunk, so fewer
        chunks would cost more time; more chunks would cost more waits."""
        self._last.clear()
        eighth = -(-nbytes // (8 * 256)) * 256
        self.chunk = min(self._rings.chunk, max(self._rings.chunk // 16, eighth))

    def send(self, src: int, nbytes: int, readers: list[int], position: int) -> None:
        """Copy nbytes from the address `src` to this rank's ring, for the ranks `readers`, from
        `position` on. Positions only grow within one collective."""
        queue, chunk = self._queue, self.chunk
        for i in range(self.chunks(nbytes)):
            index, buffer = self._buffer(self._rank, position + i)
            # At first the buffer may still hold a chunk of an earlier collective, for any reader.
            for reader in self._last.get(index, self._readers):
                queue.wait(self._flag(index, self._rank, reader), EMPTY)
            self._last[index] = readers
            queue.copy(buffer, src + i * chunk, min(chunk, nbytes - i * chunk))
            for reader in readers:
                queue.write(self._flag(index, self._rank, reader), FULL)

    def receive(self, pieces: Sequence[Incoming], nbytes: int) -> None:
        """Copy nbytes from each source's ring, one chunk from each source in turn."""
        queue, chunk = self._queue, self.chunk
        for i in range(self.chunks(nbytes)):
            for source, target, position in pieces:
                index, buffer = self._buffer(source, position + i)
                flag = self._flag(index, source, self._rank)
                queue.wait(flag, FULL)
                queue.copy(target + i * chunk, buffer, min(chunk, nbytes - i * chunk))
                queue.write(flag, EMPTY)

    def _buffer(self, source: int, position: int) -> tuple[int, int]:
        index = position % self._rings.count
        return index, self._rings.addresses[source] + index * self._rings.chunk

    def _flag(self, index: int, source: int, reader: int) -> int:
        return self._flags.address(RING + index, source, reader)


# -- Transfers between all GPUs, by direct copies or rings


@dataclass(frozen=True, slots=True)
class Memories:
    """Buffers and flags that ranks share. storages: memories by rank and place.
    direct[reader][source]: True if source can write to reader's GPU. beside_bus[reader][source]:
    True if source can write to reader's GPU and such writes leave the bus free for the host. rings:
    staging rings; None if every pair is direct."""

    storages: Sequence[dict[str, Storage]]
    flags: Flags
    direct: Sequence[Sequence[bool]]
    beside_bus: Sequence[Sequence[bool]]
    rings: Rings | None


class Pairs(NamedTuple):
    """The peers with one kind of connection to a rank, in rotated order."""

    sources: list[int]
    readers: list[int]


class Copies:
    """One rank's end of the collectives along "shard", whose ranks are all in one process, or along
    "context", whose ranks only exchange. Comm documents the methods. Flags and rings are numbered
    by the ranks' places along "shard"."""

    def __init__(
        self,
        dev: Device,
        queue: Queue,
        memories: Memories,
        axis: str = "shard",
        *,
        piece: int = 32 << 20,
        span_chunks: int = 32,
    ):
        """piece: bytes of a pinned source that are pushed while the next piece is loaded.
        span_chunks: number of chunks enqueued for sending before receiving starts. A stream's queue
        of 1024 operations holds 32 chunks, because each chunk takes three operations for each of 8
        ranks."""
        self._piece, self._span_chunks = piece, span_chunks
        self._dev = dev
        self._queue = queue
        shards = dev.mesh.ranks("shard")
        self._group = [shards.index(rank) for rank in dev.mesh.ranks(axis)]
        self._rank, self._world_size = dev.mesh.index("shard"), len(self._group)
        self._place = dev.mesh.index(axis)
        self._storages = memories.storages
        self._flags = memories.flags
        self._others = others = [self._peer(k) for k in range(1, self._world_size)]
        self._direct = direct = self._pairs(memories.direct)
        self._beside_bus = self._pairs(memories.beside_bus)
        self._staged_sources = [p for p in others if p not in direct.sources]
        self._staged_readers = [p for p in others if p not in direct.readers]
        if memories.rings is not None:
            self._staging = Staging(
                self._rank, queue, self._flags, memories.rings, self._staged_readers
            )
        self._fork = dev.event()
        self._sent = [dev.event() for _ in range(self._world_size)]

    def _pairs(self, connected: Sequence[Sequence[bool]]) -> Pairs:
        """Return the peers that `connected` marks for this rank. connected[reader][source]: True if
        the pair has this kind of connection."""
        rank = self._rank
        sources = [p for p in self._others if connected[rank][p]]
        return Pairs(sources, [p for p in self._others if connected[p][rank]])

    def _peer(self, k: int) -> int:
        return self._group[(self._place + k) % self._world_size]

    def _address(self, rank: int, tensor: Tensor) -> int:
        return self._storages[rank][tensor.storage.place].base + tensor.offset

    def _part(self, buffer: Tensor, index: int) -> Tensor:
        return part(buffer, index, self._world_size)

    # -- direct ----------------------------------------------------------------------------------

    def _grant(self, kind: int, source: int) -> None:
        self._queue.write(self._flags.address(kind, source, self._rank), EMPTY)

    def _push(self, kind: int, reader: int, target: Tensor, src: Tensor) -> None:
        """Copy src to the reader's `target`, once the reader's flag allows writing."""
        flag = self._flags.address(kind, self._rank, reader)
        self._queue.wait(flag, EMPTY)
        self._queue.copy(self._address(reader, target), src.ptr, src.nbytes)
        self._queue.write(flag, FULL)

    def _arrived(self, kind: int, source: int) -> None:
        self._queue.wait(self._flags.address(kind, source, self._rank), FULL)

    # -- collectives -----------------------------------------------------------------------------

    def all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        """Gather dst (W*n,) from src (n,); mirror (n,) or None. See Comm.all_gather."""
        own = self._part(dst, self._rank)
        shared = src if src.on_host else mirror
        pushed = self._beside_bus if src.on_host else self._direct
        staged = shared is None and (self._staged_readers or self._staged_sources)
        for source in pushed.sources:
            self._grant(TARGET, source)
        if staged:
            self._start_staging(src.nbytes)
        if shared is not None:
            self._offer(pushed.readers)
        if src.on_host and pushed.readers:
            self._load_and_push(own, src, pushed.readers)
        else:
            if not same_memory(own, src):
                self._queue.copy(own.ptr, src.ptr, src.nbytes)
            for reader in pushed.readers:
                self._push(TARGET, reader, own, src)
        if staged:
            self._gather_staged(dst, src)
        if shared is not None:
            self._read(dst, shared, pushed)
        for source in pushed.sources:
            self._arrived(TARGET, source)
        self._queue.pace()

    def _offer(self, pushed_readers: Sequence[int]) -> None:
        """Set the flags that let peers read this rank's pinned memory, except `pushed_readers`, to
        which this rank pushes."""
        for reader in self._others:
            if reader not in pushed_readers:
                self._queue.write(self._flags.address(PINNED, self._rank, reader), FULL)

    def _read(self, dst: Tensor, shared: Tensor, pushed: Pairs) -> None:
        """Pull `shared` from the pinned memory of ranks that do not push; then wait until readers
        have read this rank's pinned memory."""
        for source in self._others:
            if source not in pushed.sources:
                flag = self._flags.address(PINNED, source, self._rank)
                piece = self._part(dst, source)
                self._queue.wait(flag, FULL)
                self._queue.copy(piece.ptr, self._address(source, shared), piece.nbytes)
                self._queue.write(flag, EMPTY)
        for reader in self._others:
            if reader not in pushed.readers:
                self._queue.wait(self._flags.address(PINNED, self._rank, reader), EMPTY)

    def _load_and_push(self, own: Tensor, src: Tensor, readers: Sequence[int]) -> None:
        """Load this rank's part from host memory; push each piece to the readers as soon as the
        piece is loaded."""
        flags = [self._flags.address(TARGET, self._rank, reader) for reader in readers]
        with self._staging_stream():
            for flag in flags:
                self._queue.wait(flag, EMPTY)
        for start in range(0, src.nbytes, self._piece):
            nbytes = min(self._piece, src.nbytes - start)
            self._queue.copy(own.ptr + start, src.ptr + start, nbytes)
            with self._staging_stream():
                for reader in readers:
                    target = self._address(reader, own) + start
                    self._queue.copy(target, own.ptr + start, nbytes)
        with self._dev.on("stage"):
            for flag in flags:
                self._queue.write(flag, FULL)
            self._dev.record(self._sent[0])
        self._dev.wait(self._sent[0])

    def all_to_all(
        self,
        buffer: Tensor,
        targets: Sequence[Tensor],
        written: Event | None,
        out: Tensor | None = None,
    ) -> None:
        """Send part p of buffer to rank p. targets[k], for k >= 1: tensor to which round k writes
        the part from rank r - k, either a part of out or, if out is None, a tensor that
        Comm.all_to_all names."""
        if self._staged_readers or self._staged_sources:
            self._start_staging(targets[0].nbytes, written)
        for k in range(1, self._world_size):
            source, reader = self._peer(-k), self._peer(k)
            self._wait_sent(k - 1)  # the part sent in round k - 1 is this round's target
            if source in self._direct.sources:
                self._grant(EXCHANGED, source)
            piece = self._part(buffer, self._place + k)
            if reader in self._direct.readers:
                target = targets[1] if k == 1 else self._part(buffer, self._place + 2 * k - 1)
                if out is not None:
                    target = self._part(out, self._place)
                self._push(EXCHANGED, reader, target, piece)
            else:
                self._send(piece, reader, k)
            if source not in self._direct.sources:
                position = (k - 1) * self._staging.chunks(piece.nbytes)
                self._staging.receive([Incoming(source, targets[k].ptr, position)], piece.nbytes)
            self._queue.pace()
        self._wait_sent(self._world_size - 1)
        for source in self._direct.sources:
            self._arrived(EXCHANGED, source)
        self._queue.pace()

    # -- staged ----------------------------------------------------------------------------------

    def _start_staging(self, nbytes: int, written: Event | None = None) -> None:
        with self._staging_stream(written):
            self._staging.begin(nbytes)

    @contextmanager
    def _staging_stream(self, after: Event | None = None) -> Iterator[None]:
        """Switch to the staging stream within the block. after: event before the block's work;
        None: the current stream's work so far."""
        if after is None:
            after = self._fork
            self._dev.record(after)
        with self._dev.on("stage"):
            self._dev.wait(after)
            yield

    def _gather_staged(self, dst: Tensor, src: Tensor) -> None:
        """Gather through rings; this rank's source is staged once for all readers."""
        span = self._span_chunks * self._staging.chunk
        for start in range(0, src.nbytes, span):
            position = self._staging.chunks(start)
            nbytes = min(span, src.nbytes - start)
            if self._staged_readers:
                with self._dev.on("stage"):
                    self._staging.send(src.ptr + start, nbytes, self._staged_readers, position)
            targets = [(p, self._part(dst, p).ptr + start) for p in self._staged_sources]
            self._staging.receive([Incoming(*target, position) for target in targets], nbytes)
            self._queue.pace()
        if self._staged_readers:
            with self._dev.on("stage"):
                self._dev.record(self._sent[0])
            self._dev.wait(self._sent[0])

    def _send(self, piece: Tensor, reader: int, k: int) -> None:
        with self._dev.on("stage"):
            position = (k - 1) * self._staging.chunks(piece.nbytes)
            self._staging.send(piece.ptr, piece.nbytes, [reader], position)
            self._dev.record(self._sent[k])

    def _wait_sent(self, k: int) -> None:
        """Wait until data that round k has sent through the ring may be overwritten. Pushes need no
        wait, because the current stream executes every push."""
        if k > 0 and self._peer(k) in self._staged_readers:
            self._dev.wait(self._sent[k])
