"""Flags in pinned host memory by which streams of different GPUs wait for each other.

A graph replays the same values for ever, so a flag cannot count. It belongs to one source, one
reader and one thing that the source fills and the reader empties, and goes back and forth: whoever
waits for one state writes the other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmq.base.tensor import Tensor

# One bit each, because streams wait for a bit: RELEASED ends every wait, whatever it is for.
EMPTY, FULL, RELEASED = 1, 2, 3
# A flag is about one of these: the reader's target in a gather and in an exchange, the source's
# pinned tensor, buffer i of its ring.
TARGET, EXCHANGED, PINNED, RING = 0, 1, 2, 3
KINDS = 8  # of flags; the others are buffers of the ring


class Flags:
    """All ranks' flags. For use by all threads."""

    def __init__(self, tensors: Sequence[Tensor]):
        """tensors: I32 (KINDS * W,) of each rank, in pinned memory."""
        self._tensors = tensors
        self._world_size = len(tensors)
        self._bases = [t.ptr for t in tensors]
        for tensor in tensors:
            states = tensor.numpy().reshape(KINDS, self._world_size)
            states[:] = EMPTY
            states[[TARGET, EXCHANGED]] = FULL  # until the reader grants it

    def address(self, kind: int, source: int, reader: int) -> int:
        """Where the flag of this kind, source and reader is: in the reader's memory."""
        return self._bases[reader] + 4 * (kind * self._world_size + source)

    def release(self, ranks: Iterable[int]) -> None:
        """End the waits for flags in the memory of these ranks, until the flags change again."""
        for rank in ranks:
            self._tensors[rank].numpy().fill(RELEASED)
