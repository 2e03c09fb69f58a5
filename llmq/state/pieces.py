"""The pieces of a slab that a rank holds, and those that it writes down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.state.params import ELEMENT_ALIGN, Slab


class SlabPiece(NamedTuple):
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
    def of(cls, dev: Device, slab: Slab, tensor: Tensor) -> SlabPiece:
        """This rank's shard of a slab. The first replica, which plans are made of, writes most."""
        shard, replica = dev.mesh.index("shard"), dev.mesh.index("replica")
        start, stop = shard * slab.shard_size, (shard + 1) * slab.shard_size
        most = -(-slab.shard_size // (dev.mesh.size("replica") * ELEMENT_ALIGN)) * ELEMENT_ALIGN
        first, last = (min(start + i * most, stop) for i in (replica, replica + 1))
        return cls(slab, start, stop, tensor, (first, last))

    @property
    def written(self) -> tuple[int, int]:
        """The elements [first, last) that this rank writes down."""
        return self.own or (self.start, self.stop)

    @property
    def written_piece(self) -> SlabPiece:
        """That part of it, and of its tensor; where it is nothing, a part that is not written,
        since no tensor is empty."""
        first, last = self.written
        start = first if first < last else self.start
        stop = last if first < last else self.start + ELEMENT_ALIGN
        per_value = (self.stop - self.start) // self.tensor.size
        rows = ((edge - self.start) // per_value for edge in (start, stop))
        return SlabPiece(self.slab, start, stop, self.tensor.rows(*rows), (first, last))


State = dict[str, list[SlabPiece]]
"""The pieces of a checkpoint's groups that a rank holds."""


def state_of(
    dev: Device, table: Iterable[Slab], groups: Mapping[str, Mapping[str, Tensor]]
) -> State:
    """The pieces of groups, whose tensors are this rank's shards by name of the slab."""
    return {
        group: [SlabPiece.of(dev, slab, of[slab.name]) for slab in table if slab.name in of]
        for group, of in groups.items()
    }
