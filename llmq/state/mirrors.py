"""Copies in pinned memory of the shards that ranks gather from each other at every use.

A GPU reads there what its peer cannot copy to it (`--mirror-weights`): then the peer writes its
shard to the host once per update, not once per gather.
"""

from __future__ import annotations

from functools import partial

from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.lane import Lane


class Mirrors:
    """Mirrors of the blocks in the order in which forward gathers them."""

    def __init__(self, dev: Device):
        self.dev = dev
        self._shards: dict[str, Tensor] = {}
        self._mirrors: dict[str, Tensor] = {}
        self._lane = Lane(dev, arrive="stage")
        # These are of capture time. next: the first of the blocks whose mirror is not written yet.
        self._stale, self._next = False, 0

    def add(self, block: str, shard: Tensor, category: str) -> None:
        """Allocate the mirror of a block's shard (n,)."""
        self._shards[block] = shard
        self._mirrors[block] = self.dev.alloc(
            f"{block}.mirror", shard.shape, shard.dtype, category, "pinned"
        )
        self._lane.add(block)

    def start_micro_step(self, stale: bool) -> None:
        """Before the first gather. stale: it is the first after an update."""
        self._stale, self._next = stale, 0

    def get(self, block: str) -> Tensor | None:
        """The memory that peers may read in the gather that comes next on the current stream; None:
        nothing.

        If mirrors are stale, that of the next block is written while this one is gathered.
        """
        mirror = self._mirrors.get(block)
        if mirror is not None and self._stale:
            self._write(block)
            self._lane.use(block)
        return mirror

    def _write(self, block: str) -> None:
        blocks = list(self._mirrors)
        due = blocks[self._next : blocks.index(block) + 2]
        self._next += len(due)
        if due:
            self._lane.follow()
        for name in due:
            copy = partial(self.dev.copy, self._mirrors[name], self._shards[name])
            self._lane.arrive(name, copy)
