"""Token mixers, which replace attention in some layers and begin with a short convolution."""

from dataclasses import dataclass
from typing import Any

from llmq.arch.matrix import HalfSpec, Module, Order, Part
from llmq.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixers:
    """The mixers of one kind, such as delta nets, in some layers of a model. Each kind of mixer is
    a subclass."""

    taps: int
    """Number of tokens that the short convolution sees, including the current token."""
    layers: tuple[bool, ...]
    """True for each layer with a mixer, False for each layer with attention."""

    def half(self, config: Any, layer: int) -> HalfSpec:
        """Return the declaration of a layer's mixer. config: a ModelConfig."""
        raise NotImplementedError

    def validate(self, num_layers: int) -> None:
        """Raise ConfigError if sizes contradict each other."""
        if not 2 <= self.taps <= 16:
            raise ConfigError(f"model mixers: taps must be between 2 and 16, got {self.taps}")
        if len(self.layers) != num_layers:
            raise ConfigError(
                f"model mixers: layers must be {num_layers} values, got {len(self.layers)}"
            )


def vector(
    key: str,
    module: str,
    shape: tuple[int, ...],
    initial: str,
    *,
    kind: str = "vector",
    tensor: str = "weight",
    order: Order = (),
    bias: bool = False,
) -> Module:
    """Return a mixer's weight that is not a matrix, with its bias if there is one, stored as one
    Hugging Face module. order: the field `order` of HfPart."""
    part = Part(module=module, rows=shape[0], depthwise=kind == "conv", order=order)
    return Module(
        key=key, name=module, shape=shape, parts=(part,), kind=kind, initial=initial,
        tensor=tensor, bias=bias,
    )  # fmt: skip
