"""Flags in pinned host memory by which streams of different GPUs wait for each other.

A graph replays the same values for ever, so a flag cannot count. It belongs to one source, one
reader and one thing, and goes back and forth: the source waits for TAKEN and writes READY, the
reader waits for READY and writes TAKEN.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence

from llmq.runtime.tensor import Tensor

# One bit each, because streams wait for a bit: RELEASED ends every wait, whatever it is for.
TAKEN, READY, RELEASED = 1, 2, 3


class Flags:
    """All ranks' flags; a name gives the same flags on every rank. For use by all threads."""

    def __init__(self, tensors: Sequence[Tensor]):
        """tensors: I32 (names * W,) of each rank, in pinned memory; they become all TAKEN."""
        self._tensors = tensors
        self._world_size = len(tensors)
        self._bases = [t.ptr for t in tensors]
        self._indices: dict[Hashable, int] = {}
        self._lock = threading.Lock()
        for tensor in tensors:
            tensor.numpy().fill(TAKEN)

    def address(self, name: Hashable, source: int, reader: int) -> int:
        """Where the flag of this name, source and reader is: in the reader's memory."""
        index = self._indices.get(name)
        if index is None:
            index = self._add(name)
        return self._bases[reader] + 4 * (index * self._world_size + source)

    def _add(self, name: Hashable) -> int:
        with self._lock:
            index = self._indices.setdefault(name, len(self._indices))
        if (index + 1) * self._world_size > self._tensors[0].size:
            raise RuntimeError(f"comm: {name} is one name of a flag too many, see FLAG_NAMES")
        return index

    def release(self, ranks: Iterable[int]) -> None:
        """End the waits for flags in the memory of these ranks, until the flags change again."""
        for rank in ranks:
            self._tensors[rank].numpy().fill(RELEASED)
