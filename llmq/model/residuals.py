"""The residual stream before each block and between attention and MLP, kept for backward.

The tensors are on the device, or with --offload-residual or --offload-between in host memory, with
two buffers on the device. In forward, a layer's tensor is copied to the host while the layer's
block runs; in backward, the tensor is copied back while the next block runs. The tensors of the
last two layers stay on the device.
"""

from collections.abc import Sequence
from functools import partial

from llmq.base.dtypes import DType
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.lane import Lane

SLOTS = 2


class Stream:
    """The residual stream (rows, C) of some layers, either before blocks or between attention and
    MLP. tensors: by layer, the device tensor during the layer's use."""

    def __init__(
        self,
        dev: Device,
        name: str,
        layers: Sequence[int],
        shape: tuple[int, int],
        dtype: DType,
        *,
        offload: bool,
        keep: bool = True,
    ):
        """offload: True to keep tensors in host memory. keep: True if backward reads the tensors;
        False if two buffers alternate."""
        self.dev = dev
        self._index = {layer: i for i, layer in enumerate(layers)}
        count = min(SLOTS, len(layers)) if offload or not keep else len(layers)
        buffers = [dev.alloc(f"{name}.{i}", shape, dtype, "Activations") for i in range(count)]
        self.tensors = {layer: buffers[i % count] for layer, i in self._index.items()}
        self._host = [
            dev.alloc(f"{name}.host.{i}", shape, dtype, "Activations", "pinned")
            for i in range(len(layers) - count if keep else 0)
        ]
        # The lane is empty after each backward pass, when every tensor has been copied back.
        self._lane = Lane(dev, range(SLOTS))

    def leaves(self, layer: int) -> bool:
        """Return True if the layer's tensor is in host memory between forward and backward."""
        return self._index.get(layer, len(self._host)) < len(self._host)

    def write(self, layer: int) -> None:
        """Wait for the layer's buffer; call this method before forward writes the layer's
        tensor."""
        if layer in self._index:
            self._lane.free(self._index[layer] % SLOTS)

    def written(self, layer: int) -> None:
        """Start the copy to the host; call this method after the layer's tensor is written."""
        if self.leaves(layer):
            index = self._index[layer]
            copy = partial(self.dev.copy, self._host[index], self.tensors[layer])
            self._lane.leave(index % SLOTS, copy)

    def read(self, layer: int) -> None:
        """Wait for the copy to the device; call this method before backward reads the layer's
        tensor."""
        if self.leaves(layer):
            self._lane.use(self._index[layer] % SLOTS)

    def was_read(self, layer: int) -> None:
        """Start to copy the tensor of the layer two below to the device, into this layer's buffer;
        call this method after the layer's backward pass."""
        following = self._index.get(layer, 0) - SLOTS
        if 0 <= following < len(self._host):
            self._lane.release(following % SLOTS)
            copy = partial(self.dev.copy, self.tensors[layer], self._host[following])
            self._lane.arrive(following % SLOTS, copy)


class Residuals(Stream):
    """The residual stream before all layers of a model. final: (rows, C), the stream after the last
    layer."""

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
        layers = range(num_layers)
        super().__init__(dev, "residual", layers, shape, dtype, offload=offload, keep=keep)
        self.final = dev.alloc("residual.final", shape, dtype, "Activations")

    def after(self, layer: int) -> Tensor:
        return self.tensors.get(layer + 1, self.final)
