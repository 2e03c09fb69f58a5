"""The pieces of a slab that a rank holds, and those that it writes down; and a copy of them in host
memory, from which a checkpoint is written during training.

Masters and moments change in the update of a step and nowhere else. So they are copied beside
forward and backward passes of the step that follows, on a stream of their own, and only the update
waits for the copy: it costs a step nothing that is as long as the copy takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from llmq.base.dtypes import MIB, U8
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.state.params import ELEMENT_ALIGN, Slab


class SlabPiece(NamedTuple):
    """Elements [start, stop) of a slab, which a rank holds in `tensor`. own: the elements [first,
    last) that it writes down, where ranks with the same shard each write a part of it; None:
    all."""

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


# Bytes of one copy. Others that share a copy engine, of residuals and streamed weights, wait no
# longer for it than 1 ms.
COPIED = 16 * MIB


class Snapshot:
    """Memory for one copy of a state, in pinned memory, and the order between it and updates. copy:
    the state as of the last `take`; may be read once `is_done`, until the next `take`."""

    def __init__(self, dev: Device, state: State, copied: int | None = None):
        """state: always the same tensors. The parts of it that this rank writes down are copied,
        so many bytes at a time."""
        self.dev = dev
        self._copied = COPIED if copied is None else copied
        self._state = {group: [p.written_piece for p in of] for group, of in state.items()}
        self.copy: State = {group: [self._like(p) for p in of] for group, of in self._state.items()}
        on_host = any(piece.tensor.on_host for of in state.values() for piece in of)
        # A copy from host memory to host memory would keep the rank's thread: it goes this way.
        self._way = dev.alloc("snapshot", (self._copied,), U8, "Checkpoint") if on_host else None
        self._begun, self._ended = dev.event(), dev.event()
        self._waits = False  # whether no update has waited for the last copy

    def _like(self, piece: SlabPiece) -> SlabPiece:
        tensor = piece.tensor
        memory = (f"{tensor.name}.copy", tensor.shape, tensor.dtype, "Checkpoint", "pinned")
        return piece._replace(tensor=self.dev.alloc(*memory))

    def take(self) -> None:
        """Begin to copy the state as it is after all that was enqueued; call between two steps."""
        self.dev.record(self._begun)
        with self.dev.on("save"):
            self.dev.wait(self._begun)
            for group, pieces in self._state.items():
                for piece, copied in zip(pieces, self.copy[group], strict=True):
                    self._enqueue(copied.tensor, piece.tensor)
            self.dev.record(self._ended)
        self._waits = True

    def _enqueue(self, dst: Tensor, src: Tensor) -> None:
        step = max(self._copied // src.dtype.itemsize, 1)
        for start in range(0, src.size, step):
            there, here = (t.rows(start, min(start + step, src.size)) for t in (dst, src))
            if src.on_host:
                way = self._way.rows(0, here.nbytes)
                self.dev.copy(way, here)
                here = way
            self.dev.copy(there, here)

    def hold(self) -> None:
        """Let what follows on the current stream, which may change the state, wait for the copy."""
        if self._waits:
            self.dev.wait(self._ended)
            self._waits = False

    def is_done(self) -> bool:
        """Whether the copy is complete; any thread may ask. RuntimeError if the device failed."""
        return self.dev.has_passed(self._ended)
