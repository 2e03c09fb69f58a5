"""What a rank holds of a slab, and what of that it writes down."""

from __future__ import annotations

from typing import NamedTuple

from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.state.params import ELEMENT_ALIGN, Slab


class Piece(NamedTuple):
    """Elements [start, stop) of a slab, which a rank holds in `tensor`.

    own: the elements [first, last) that it writes down, where ranks with the same shard each write
    a part of it; None: all.
    """

    slab: Slab
    start: int
    stop: int
    tensor: Tensor
    own: tuple[int, int] | None = None

    @classmethod
    def of(cls, dev: Device, slab: Slab, tensor: Tensor) -> Piece:
        """This rank's shard of a slab."""
        start, stop = dev.shard * slab.shard_size, (dev.shard + 1) * slab.shard_size
        rows = slab.shard_size // ELEMENT_ALIGN
        edges = [rows * i // dev.replicas * ELEMENT_ALIGN for i in (dev.replica, dev.replica + 1)]
        return cls(slab, start, stop, tensor, (start + edges[0], start + edges[1]))

    @property
    def written(self) -> tuple[int, int]:
        """The elements [first, last) that this rank writes down."""
        return self.own or (self.start, self.stop)
