"""Copies between GPUs that cannot reach each other, through rings of buffers in pinned memory.

Each rank has one ring. It copies a chunk into the next buffer and marks it full for those who read
it; each of them copies it to its GPU and marks it empty. Sending runs on the stage stream, so that
both directions of the bus are busy, and the chunks of all sources are received in turn. A chunk's
position within one collective decides through which buffer it goes, so that sender and reader agree
without talking and a graph may be replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llmq.comm.options import EMPTY, FULL, RING, Flags


class Queue(Protocol):
    """The operations of a rank's current stream on addresses in the memory of any rank."""

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy from this GPU, also to another one to which there is access; or from pinned memory
        to this GPU."""

    def wait(self, address: int, value: int) -> None:
        """Wait until the 32-bit word at the address has a bit in common with value."""

    def write(self, address: int, value: int) -> None:
        """Write the word; everything before is visible to whoever sees it."""

    def pace(self) -> None:
        """Called between short sequences of the above: the host may wait here for the stream."""


@dataclass(frozen=True, slots=True)
class Rings:
    """All ranks' rings: their addresses, each of `count` buffers of `chunk` bytes."""

    addresses: Sequence[int]
    chunk: int
    count: int


class Incoming(NamedTuple):
    """The data to receive from one source: to which address, from which position of its ring on."""

    source: int
    target: int
    position: int


class Staging:
    """One rank's sending and receiving."""

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
        """How many positions of a ring that many bytes take."""
        return -(-nbytes // self.chunk)

    def begin(self, nbytes: int) -> None:
        """Start a new collective, at position 0. nbytes: what one source sends to one reader. That
        is cut into 8 chunks: fewer would make the first and the last one, which nothing overlaps, a
        larger share, and more would cost more waits."""
        self._last.clear()
        eighth = -(-nbytes // (8 * 256)) * 256
        self.chunk = min(self._rings.chunk, max(self._rings.chunk // 16, eighth))

    def send(self, src: int, nbytes: int, readers: list[int], position: int) -> None:
        """Copy to the ring, from that position on; positions of one collective only grow."""
        queue, chunk = self._queue, self.chunk
        for i in range(self.chunks(nbytes)):
            index, buffer = self._buffer(self._rank, position + i)
            # At first the buffer may still hold what an earlier collective left for anyone.
            for reader in self._last.get(index, self._readers):
                queue.wait(self._flag(index, self._rank, reader), EMPTY)
            self._last[index] = readers
            queue.copy(buffer, src + i * chunk, min(chunk, nbytes - i * chunk))
            for reader in readers:
                queue.write(self._flag(index, self._rank, reader), FULL)

    def receive(self, pieces: Sequence[Incoming], nbytes: int) -> None:
        """Copy nbytes from each source's ring, one chunk of each in turn."""
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
