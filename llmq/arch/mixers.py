"""Halves that layers have in the place of attention, with a short convolution of their inputs."""

from dataclasses import dataclass
from typing import Any

from llmq.arch.matrix import HalfSpec, Module, Order, Part
from llmq.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixers:
    """The token mixers of one kind that some layers of a model have. A kind is a subclass."""

    taps: int
    """Tokens that the short convolution sees, the newest one included."""
    layers: tuple[bool, ...]
    """True for each layer with a mixer, False for attention."""

    def half(self, config: Any, layer: int) -> HalfSpec:
        """The mixer of a layer. config: a ModelConfig."""
        raise NotImplementedError

    def validate(self, num_layers: int) -> None:
        """Raise ConfigError if sizes disagree."""
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
    """A mixer's weight that is no matrix, with its bias if there is one: one module at Hugging
    Face. order: as in HfPart."""
    part = Part(module=module, rows=shape[0], depthwise=kind == "conv", order=order)
    return Module(
        key=key, name=module, shape=shape, parts=(part,), kind=kind, initial=initial,
        tensor=tensor, bias=bias,
    )  # fmt: skip
