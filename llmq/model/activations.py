"""What a block keeps from forward to backward: options, and the tensors of half a layer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from llmq.arch.matrix import HalfSpec
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E4M3, DType
from llmq.base.layers import layer_set
from llmq.base.tensor import Tensor
from llmq.model.norm import Stats
from llmq.model.parameters import BlockParameters
from llmq.options.adapters import adapted_matrices, adapters_of
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device

T = TypeVar("T")


class Recompute(NamedTuple):
    """What a layer computes again in the backward pass instead of keeping it: --recompute-…"""

    swiglu: bool = False
    norm: bool = False
    ffn: bool = False
    qkv: bool = False
    att: bool = False
    block: bool = False


def recompute_of_layers(options: TrainConfig, num_layers: int) -> list[Recompute]:
    """For each layer what the options say, or nothing. options: normalized."""
    chosen = layer_set(options.recompute_layers, num_layers)
    asked = Recompute(*[getattr(options, f"recompute_{name}") for name in Recompute._fields])
    return [asked if layer in chosen else Recompute() for layer in range(num_layers)]


def slot(layer: int, name: str) -> str:
    """The name of a block's tensor among those of all blocks."""
    return f"layers.{layer}.{name}"


class Activation(NamedTuple):
    """An activation of one layer, and what is kept of it from forward to backward.

    shape: (rows, features), rows = B*T. tensor: the whole of it, in this dtype, which may be of the
    codes that a product writes. codes: fp8 (features, rows), which are enough where backward only
    needs it for a weight's gradient. With neither it is scratch.
    """

    layer: int
    name: str
    shape: tuple[int, int]
    dtype: DType
    tensor: Tensor | None
    codes: Tensor | None

    @property
    def slot(self) -> str:
        """Its name among those of all layers."""
        return slot(self.layer, self.name)

    def place(self, dev: Device, temps: ExitStack) -> Tensor:
        """Where it is kept, else scratch that lives as long as temps."""
        if self.tensor is not None:
            return self.tensor
        return temps.enter_context(dev.scratch(self.name, self.shape, self.dtype))


class HalfOut(NamedTuple):
    """Where a half's last product goes, (rows, C): to `out`, with `addend` if there is one."""

    out: Tensor
    addend: Tensor | None = None


class NormSite(NamedTuple):
    """The norms in front of a half of one layer, and the residual stream there; see block_norms.py.

    stream: (rows, C). branch: (rows, C), what the half before has put out; None where it has added
    that to the stream itself. out: the half's input. stats: of the stream's norm, post_stats: of
    the branch's; None where there is none.
    """

    stream: Tensor
    branch: Tensor | None
    stats: Stats | None
    post_stats: Stats | None
    out: Activation

    def parameters(self, block: BlockParameters[T]) -> tuple[T | None, T | None]:
        """Weight and bias of the stream's norm among those of its block, or their gradients."""
        return block.get(self.out.name), block.bias(self.out.name)

    def post_weight(self, block: BlockParameters[T]) -> T | None:
        """The weight of the branch's norm, or its gradient."""
        return block.get(f"{self.out.name}_post")


def needed_inputs(config: ModelConfig, options: TrainConfig, layer: int) -> set[str]:
    """Keys of a layer's matrices whose gradients, or those of adapters, need their inputs."""
    adapters = adapters_of(options)
    if adapters is None:
        return {matrix.key for matrix in config.matrices(layer)}
    return {matrix.key for matrix in adapted_matrices(config, adapters.targets, layer)}


class HalfLayer:
    """A half in one layer: what it works on there, and what of it is kept for backward.

    norm: in front of it. out: where its output goes. kept: what its class keeps, see `Half.keep`.
    """

    norm: NormSite
    out: HalfOut
    kept: Any

    def __init__(
        self,
        dev: Device,
        options: TrainConfig,
        spec: HalfSpec,
        index: int,
        recompute: Recompute,
        stream: Tensor,
        needed: set[str],
    ):
        """stream: (rows, C). needed: of the layer, as needed_inputs says."""
        self.spec, self.index, self.recompute = spec, index, recompute
        self._dev, self._needed = dev, needed
        self._rows, self._dtype = stream.shape[0], stream.dtype
        # Adapters multiply tensors.
        self._keeps_codes = options.matmul_dtype == "e4m3" and not options.lora_rank

    def needs(self, name: str) -> bool:
        """Whether a gradient needs the input of this name."""
        return any(m.input == name and m.key in self._needed for m in self.spec.matrices)

    def alloc(self, name: str, *shape: int, dtype: DType | None = None) -> Tensor:
        """A tensor of this layer; dtype: as the stream's if it is not given."""
        dtype = dtype or self._dtype
        return self._dev.alloc(f"{name}.{self.index}", shape, dtype, "Activations")

    def activation(
        self,
        name: str,
        features: int,
        *,
        kept: bool,
        may_be_codes: bool = False,
        dtype: DType | None = None,
    ) -> Activation:
        """An activation (rows, features), with memory if it is kept. may_be_codes: backward needs
        it for weights' gradients alone."""
        shape, tensor, codes = (self._rows, features), None, None
        dtype = dtype or self._dtype
        if kept and may_be_codes and self._keeps_codes:
            codes = self.alloc(f"{name}_t", *shape[::-1], dtype=E4M3)
        elif kept:
            tensor = self.alloc(name, *shape, dtype=dtype)
        return Activation(self.index, name, shape, dtype, tensor, codes)

    def slot(self, name: str) -> str:
        """The name of one of its gradients among those of all layers."""
        return slot(self.index, name)

    @property
    def out_slot(self) -> str:
        """That of the gradient of its output."""
        return self.slot(f"d_{self.spec.name}")
