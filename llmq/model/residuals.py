"""The residual stream at the start of each block, which backward needs again, and at the end.

On the device for every layer, or (--offload-residual) in host memory with two buffers on the
device: in forward a layer's residual leaves while its block runs, in backward it arrives again
while the block after it runs. The last two never leave.
"""

from functools import partial

from llmq.base.dtypes import DType
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.lane import Lane

SLOTS = 2


class Residuals:
    """The residuals of all layers of a model, (rows, C) each. `tensors[layer]`: where it is while
    in use.

    final: behind the last layer.
    """

    def __init__(
        self,
        dev: Device,
        num_layers: int,
        shape: tuple[int, int],
        dtype: DType,
        *,
        offload: bool,
        keep: bool = True,
    ):
        """keep: backward will read them; else two buffers take turns and nothing leaves."""
        self.dev = dev
        count = min(SLOTS, num_layers) if offload or not keep else num_layers
        buffers = [dev.alloc(f"residual.{i}", shape, dtype, "Activations") for i in range(count)]
        self.tensors = [buffers[layer % count] for layer in range(num_layers)]
        self.final = dev.alloc("residual.final", shape, dtype, "Activations")
        self._host = [
            dev.alloc(f"residual.host.{i}", shape, dtype, "Activations", "pinned")
            for i in range(num_layers - count if keep else 0)
        ]
        # Empty after each backward pass: all that left in forward has arrived again.
        self._lane = Lane(dev, range(SLOTS))

    def leaves(self, layer: int) -> bool:
        """Whether the layer's residual goes to host memory between forward and backward."""
        return 0 <= layer < len(self._host)

    def after(self, layer: int) -> Tensor:
        """The stream behind a layer."""
        return self.tensors[layer + 1] if layer + 1 < len(self.tensors) else self.final

    def write(self, layer: int) -> None:
        """Before the current stream writes a layer's residual in a forward pass that is kept.

        layer: one behind the last layer stands for `final`.
        """
        if layer < len(self.tensors):
            self._lane.free(layer % SLOTS)

    def written(self, layer: int) -> None:
        """The layer's residual is written, and backward will read it."""
        if self.leaves(layer):
            copy = partial(self.dev.copy, self._host[layer], self.tensors[layer])
            self._lane.leave(layer % SLOTS, copy)

    def read(self, layer: int) -> None:
        """Before the current stream reads a layer's residual in backward."""
        if self.leaves(layer):
            self._lane.use(layer % SLOTS)

    def was_read(self, layer: int) -> None:
        """The layer's backward pass is enqueued: its buffer is for the residual two layers down."""
        following = layer - SLOTS
        if self.leaves(following):
            self._lane.release(layer % SLOTS)
            copy = partial(self.dev.copy, self.tensors[following], self._host[following])
            self._lane.arrive(layer % SLOTS, copy)
