"""The residual stream at the start of each block, which backward needs again.

On the device for every layer, or (--offload-residual) in host memory with two buffers on the
device: in forward a layer's residual leaves on the store stream once its block has run, in backward
it comes back on the copy stream while the block after it runs. The last two never leave.
"""

from __future__ import annotations

from llmq.base.dtypes import DType
from llmq.runtime.device import Device

SLOTS = 2


class Residuals:
    """Of all layers of a model, (rows, C) each. `tensors[layer]`: where it is while in use."""

    def __init__(
        self, dev: Device, num_layers: int, shape: tuple[int, int], dtype: DType, *, offload: bool
    ):
        self.dev = dev
        count = min(SLOTS, num_layers) if offload else num_layers
        buffers = [dev.alloc(f"residual.{i}", shape, dtype, "Activations") for i in range(count)]
        self.tensors = [buffers[layer % count] for layer in range(num_layers)]
        self._host = [
            dev.alloc(f"residual.host.{i}", shape, dtype, "Activations", "pinned")
            for i in range(num_layers - count)
        ]
        self._left, self._free, self._arrived = (
            [dev.event() for _ in range(SLOTS)] for _ in range(3)
        )

    def leaves(self, layer: int) -> bool:
        """Whether the layer's residual goes to host memory between forward and backward."""
        return 0 <= layer < len(self._host)

    def write(self, layer: int) -> None:
        """Before the current stream writes a layer's residual in a forward pass that is kept."""
        if self.leaves(layer - SLOTS):
            self.dev.wait(self._left[layer % SLOTS])

    def written(self, layer: int) -> None:
        """The layer's forward pass is enqueued, and backward will read its residual."""
        if not self.leaves(layer):
            return
        index = layer % SLOTS
        self.dev.record(self._free[index])
        with self.dev.on("store"):
            self.dev.wait(self._free[index])
            self.dev.copy(self._host[layer], self.tensors[layer])
            self.dev.record(self._left[index])

    def read(self, layer: int) -> None:
        """Before the current stream reads a layer's residual in backward."""
        if self.leaves(layer):
            self.dev.wait(self._arrived[layer % SLOTS])

    def was_read(self, layer: int) -> None:
        """The layer's backward pass is enqueued: its buffer is for the residual two layers down."""
        following = layer - SLOTS
        if not self.leaves(following):
            return
        index = layer % SLOTS
        self.dev.record(self._free[index])
        with self.dev.on("copy"):
            self.dev.wait(self._free[index])
            self.dev.copy(self.tensors[following], self._host[following])
            self.dev.record(self._arrived[index])
