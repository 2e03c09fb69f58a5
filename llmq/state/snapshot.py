"""A copy of a rank's state in host memory, from which a checkpoint is written during training.

Masters and moments change in the update of a step and nowhere else. So they are copied beside
forward and backward passes of the step that follows, on a stream of their own, and only the update
waits for the copy: it costs a step nothing that is as long as the copy takes.
"""

from __future__ import annotations

from llmq.base.dtypes import MIB, U8
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.state.pieces import SlabPiece, State

# Bytes of one copy. Others that share a copy engine, of residuals and streamed weights, wait no
# longer for it than 1 ms.
COPIED = 16 * MIB


class Snapshot:
    """Memory for one copy of a state, in pinned memory, and the order between it and updates.

    copy: the state as of the last `take`; may be read once `is_done`, until the next `take`.
    """

    def __init__(self, dev: Device, state: State):
        """state: always the same tensors. The parts of it that this rank writes down are copied."""
        self.dev = dev
        self._state = {group: [p.written_piece for p in of] for group, of in state.items()}
        self.copy: State = {group: [self._like(p) for p in of] for group, of in self._state.items()}
        on_host = any(piece.tensor.on_host for of in state.values() for piece in of)
        # A copy from host memory to host memory would keep the rank's thread: it goes this way.
        self._way = dev.alloc("snapshot", (COPIED,), U8, "Checkpoint") if on_host else None
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
        step = max(COPIED // src.dtype.itemsize, 1)
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
