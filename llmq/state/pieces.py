"""Ranges of slabs that a rank saves in checkpoints, and a snapshot of these in host memory.

A checkpoint is written from the snapshot while training goes on. Masters and moments change only in
the update of a step. So the copy to the snapshot runs during forward and backward of the next step,
on a separate stream, and only the update waits for the copy. A step shorter than the copy is
delayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from llmq.base.dtypes import MIB, U8
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.state.params import ELEMENT_ALIGN, Slab


class SlabPiece(NamedTuple):
    """The elements [start, stop) of a slab, which `tensor` on this rank holds. own: the elements
    [first, last) of the slab that this rank saves, if several ranks hold the same shard and each
    saves a part; None: all elements."""

    slab: Slab
    start: int
    stop: int
    tensor: Tensor
    own: tuple[int, int] | None = None

    @classmethod
    def of(cls, dev: Device, slab: Slab, tensor: Tensor) -> SlabPiece:
        """Return this rank's shard of a slab as a piece. The first replica saves the largest part,
        because memory plans describe the first replica."""
        shard, replica = dev.mesh.index("shard"), dev.mesh.index("replica")
        start, stop = shard * slab.shard_size, (shard + 1) * slab.shard_size
        most = -(-slab.shard_size // (dev.mesh.size("replica") * ELEMENT_ALIGN)) * ELEMENT_ALIGN
        first, last = (min(start + i * most, stop) for i in (replica, replica + 1))
        return cls(slab, start, stop, tensor, (first, last))

    @property
    def written(self) -> tuple[int, int]:
        """Return the elements [first, last) that this rank saves."""
        return self.own or (self.start, self.stop)

    @property
    def written_piece(self) -> SlabPiece:
        """Return a piece with only the elements that this rank saves. For a rank that saves
        nothing, the piece has some elements and an empty `own`, because no tensor can be empty."""
        first, last = self.written
        start = first if first < last else self.start
        stop = last if first < last else self.start + ELEMENT_ALIGN
        per_value = (self.stop - self.start) // self.tensor.size
        rows = ((edge - self.start) // per_value for edge in (start, stop))
        return SlabPiece(self.slab, start, stop, self.tensor.rows(*rows), (first, last))


State = dict[str, list[SlabPiece]]
"""The pieces that a rank holds, by group of checkpoint files."""


def state_of(
    dev: Device, table: Iterable[Slab], groups: Mapping[str, Mapping[str, Tensor]]
) -> State:
    """Return this rank's pieces, by group of checkpoint files. groups: this rank's shards, by group
    and slab."""
    return {
        group: [SlabPiece.of(dev, slab, of[slab.name]) for slab in table if slab.name in of]
        for group, of in groups.items()
    }


# Bytes of one copy. Copies of residuals and streamed weights, which use the same copy engine, wait
# at most 1 ms for such a copy.
COPIED = 16 * MIB


class Snapshot:
    """A copy of a training state in pinned memory, taken between two updates. copy: the state at
    the last `take`, valid once `is_done` returns True, until the next `take`."""

    def __init__(self, dev: Device, state: State, copied: int | None = None):
        """state: the pieces that each `take` copies, restricted to elements that this rank saves.
        copied: number of bytes of one copy; None: COPIED."""
        self.dev = dev
        self._copied = COPIED if copied is None else copied
        self._state = {group: [p.written_piece for p in of] for group, of in state.items()}
        self.copy: State = {group: [self._like(p) for p in of] for group, of in self._state.items()}
        on_host = any(piece.tensor.on_host for of in state.values() for piece in of)
        # Copying host memory to host memory would block the rank's thread, so state in host memory
        # is copied through a device buffer.
        self._bounce = dev.alloc("snapshot", (self._copied,), U8, "Checkpoint") if on_host else None
        self._begun, self._ended = dev.event(), dev.event()
        self._waits = False  # True until an update has waited for the last copy

    def _like(self, piece: SlabPiece) -> SlabPiece:
        tensor = piece.tensor
        copy = self.dev.alloc(
            f"{tensor.name}.copy", tensor.shape, tensor.dtype, "Checkpoint", "pinned"
        )
        return piece._replace(tensor=copy)

    def take(self) -> None:
        """Start to copy the state after all work enqueued so far; call this method between two
        steps."""
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
            target, source = (t.rows(start, min(start + step, src.size)) for t in (dst, src))
            if src.on_host:
                bounce = self._bounce.rows(0, source.nbytes)
                self.dev.copy(bounce, source)
                source = bounce
            self.dev.copy(target, source)

    def hold(self) -> None:
        """Make later work of the current stream, which may change the state, wait for the copy."""
        if self._waits:
            self.dev.wait(self._ended)
            self._waits = False

    def is_done(self) -> bool:
        """Return True if the copy is complete; any thread may call this method. Raise RuntimeError
        if the device failed."""
        return self.dev.has_passed(self._ended)
