"""Low-rank adapters of a frozen model: which matrices they are of.

An adapter adds s * B @ A to a matrix (out, in) that stays as it is: A is (rank, in) and B (out,
rank). It is of one module as Hugging Face names it, so that where its files hold queries, keys and
values in one matrix, these three share an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from llmq.arch.matrix import Part
from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.options.option_types import LORA_TARGETS
from llmq.options.rule import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters that are trained beside matrices that stay as they are; they decide about the
    model's weight table.

    targets: some of LORA_TARGETS. train: some of LORA_PARTS.
    """

    rank: int
    targets: tuple[str, ...]
    train: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A matrix of a block, by its key there, with its adapters.

    shape: (rows, in_features), with the rows of all experts. parts: of the adapters, each with its
    rows [start, stop) of the matrix.
    """

    key: str
    shape: tuple[int, int]
    parts: tuple[tuple[Part, int, int], ...]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Rows [start, stop) of each adapter."""
        return tuple((start, stop) for _, start, stop in self.parts)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the adapters' modules at Hugging Face."""
        return tuple(part.module for part, _, _ in self.parts)


def adapters_of(config: Options) -> Adapters | None:
    """The adapters of a run; None where all of the model is trained. config: normalized."""
    if not config.lora_rank:
        return None
    targets = LORA_TARGETS if config.lora_targets == "all" else config.lora_targets.split(",")
    return Adapters(rank=config.lora_rank, targets=tuple(targets), train=config.train)


def has_target(model: ModelConfig, target: str) -> bool:
    """Whether a module of the model is named so in --lora-targets."""
    matrices = (m for layer in range(model.num_layers) for m in model.matrices(layer))
    return any(target in part.targets for matrix in matrices for part in matrix.parts)


@lru_cache(maxsize=1024)
def adapted_matrices(
    model: ModelConfig, targets: tuple[str, ...], layer: int
) -> tuple[Adapted, ...]:
    """The matrices of a block that get adapters, in the order of the block.

    targets: what the model does not have is left out. ConfigError where a part of a module is
    named, and another one is not.
    """
    found = []
    for matrix in model.matrices(layer):
        chosen = []
        for part, start, stop in matrix.spans:
            named = [target for target in part.targets if target in targets]
            if named and len(named) < len(part.targets):
                raise ConfigError(
                    f"--lora-targets: {', '.join(part.targets)} are one matrix, "
                    f"{part.module.rpartition('.')[2]}, of {model.architecture}: name all of them "
                    f"or none, got {', '.join(named)}"
                )
            if named:
                chosen.append((part, start, stop))
        if chosen:
            columns = matrix.shape[-1]
            shape = (prod(matrix.shape) // columns, columns)
            found.append(Adapted(key=matrix.key, shape=shape, parts=tuple(chosen)))
    return tuple(found)


def all_adapted(model: ModelConfig, targets: tuple[str, ...]) -> Iterator[tuple[int, Adapted]]:
    """As adapted_matrices, of all blocks, each with its layer."""
    for layer in range(model.num_layers):
        for matrix in adapted_matrices(model, targets, layer):
            yield layer, matrix


def needed_inputs(model: ModelConfig, config: Options, layer: int) -> set[str]:
    """Keys of a layer's matrices whose gradients, or those of adapters, need their inputs."""
    adapters = adapters_of(config)
    if adapters is None:
        return {matrix.key for matrix in model.matrices(layer)}
    return {matrix.key for matrix in adapted_matrices(model, adapters.targets, layer)}


def multiplied_sizes(model: ModelConfig) -> dict[str, int]:
    """Rows and columns of all matrices of blocks, by what messages call them."""
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "width of the query heads": model.num_heads * model.head_dim,
        "width of queries, keys and values": model.qkv_channels,
    }
    for matrix in (m for layer in range(model.num_layers) for m in model.matrices(layer)):
        rows, columns = matrix.shape[-2:]
        sizes |= {f"height of {matrix.name}": rows, f"width of {matrix.name}": columns}
    return sizes
