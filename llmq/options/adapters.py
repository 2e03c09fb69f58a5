"""Low-rank adapters of a frozen model, and the matrices that get them. An adapter adds s * B @ A to
a matrix (out, in): A is (rank, in), B (out, rank). Each adapter belongs to one Hugging Face module,
which may hold queries, keys and values together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from llmq.arch.matrix import Matrix, Module, Part
from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.options.option_types import (
    LORA_TARGETS,
    NONE,
    OF_EXPERTS,
    OF_TABLES,
    layer_set,
    numbers_of,
)
from llmq.options.rule import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters to train beside a frozen model; they determine entries of the model's weight
    table.

    targets: some of LORA_TARGETS, or a regular expression that matches whole module names. train:
    some of LORA_PARTS. layers: text that `layer_set` reads. alpha, rs: the scaling is alpha / rank,
    or alpha / sqrt(rank) with rs. ranks, alphas: exceptions for modules whose names end with a
    pattern (PEFT's rank_pattern and alpha_pattern); the first match counts. dora: True if adapted
    rows have trained magnitudes (PEFT's use_dora).
    """

    rank: int
    targets: tuple[str, ...] | str
    train: tuple[str, ...] = ()
    layers: str = "all"
    alpha: float = 1.0
    rs: bool = False
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    dora: bool = False

    @property
    def uniform(self) -> bool:
        """True if all adapters have one rank and one scaling."""
        return not self.ranks and not self.alphas

    def of(self, module: str) -> tuple[int, float]:
        """Rank and scaling of a module's adapter."""
        rank, alpha = _of(self.ranks, module, self.rank), _of(self.alphas, module, self.alpha)
        return rank, alpha / (rank**0.5 if self.rs else rank)


def _of(patterns: Iterable[tuple[str, Any]], module: str, otherwise: Any) -> Any:
    found = (number for pattern, number in patterns if matches(pattern, module))
    return next(found, otherwise)


def matches(pattern: str, module: str) -> bool:
    """True if a pattern of ranks or alphas applies to this module."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


class AdaptedPart(NamedTuple):
    """The adapter of rows [start, stop) of a matrix."""

    part: Part
    start: int
    stop: int
    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A matrix of a block, the embedding or the LM head, with its adapters. key: name in the block.
    shape: (rows, in_features), with the rows of all experts. groups: number of experts, 1 without
    experts. active: number of experts for each token. parts: the matrix's adapters; of fused
    experts each has one, and all belong to one module."""

    key: str
    shape: tuple[int, int]
    groups: int
    active: int
    parts: tuple[AdaptedPart, ...]

    @property
    def rank(self) -> int:
        """The largest rank of the matrix's adapters. A and B of smaller adapters are padded with
        zeros, whose gradients are zero."""
        return max(part.rank for part in self.parts)

    @property
    def scales(self) -> tuple[float, ...]:
        """The scaling of each adapter."""
        return tuple(part.scale for part in self.parts)

    def times(self, factor: float) -> Adapted:
        """Return the same adapters with scalings times `factor`, for a product that is multiplied
        by `factor`."""
        parts = tuple(part._replace(scale=factor * part.scale) for part in self.parts)
        return replace(self, parts=parts)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Rows [start, stop) of each adapter."""
        return tuple((part.start, part.stop) for part in self.parts)

    @property
    def modules(self) -> tuple[str, ...]:
        """Hugging Face module name of each adapter."""
        return tuple(part.part.module for part in self.parts)

    @property
    def fused(self) -> Part | None:
        """The fused experts' parameter to which all adapters belong; None for other matrices."""
        part = self.parts[0].part
        return part if part.experts else None


def adapters_of(config: Options) -> Adapters | None:
    """Return the adapters of a run; None if the whole model is trained. config: normalized."""
    if not config.has_adapters:
        return None
    # "all" leaves out experts, because they are many, and tables, as in PEFT.
    targets = tuple(t for t in LORA_TARGETS if t not in (*OF_EXPERTS, *OF_TABLES))
    if config.lora_targets != "all":
        targets = tuple(config.lora_targets.split(",")) if config.lora_targets != NONE else ()
    return Adapters(
        rank=config.lora_rank,
        targets=targets if {*targets} <= {*LORA_TARGETS} else config.lora_targets,
        train=config.train,
        layers=config.lora_layers,
        alpha=config.lora_alpha,
        rs=config.lora_scaling == "rs",
        ranks=numbers_of(config.lora_rank_pattern, int),
        alphas=numbers_of(config.lora_alpha_pattern, float),
        dora=config.lora_dora,
    )


def has_target(model: ModelConfig, target: str) -> bool:
    """True if the model has modules of this target of --lora-targets."""
    matrices = (m for layer in range(model.num_layers) for m in model.matrices(layer))
    parts = (part for matrix in matrices for part in (*matrix.parts, matrix.fused))
    parts = chain(parts, (part for table in token_matrices(model).values() for part in table.parts))
    return any(target in part.targets for part in parts if part is not None)


@lru_cache(maxsize=1024)
def adapted_matrices(model: ModelConfig, adapters: Adapters, layer: int) -> tuple[Adapted, ...]:
    """Return the matrices of a layer that get adapters, in the block's order. ConfigError if only a
    part of a module is named; ValueError for layers that the model lacks."""
    if layer not in layer_set(adapters.layers, model.num_layers):
        return ()
    every = (_adapted(model, adapters, matrix) for matrix in model.matrices(layer))
    return tuple(found for found in every if found is not None)


@lru_cache(maxsize=64)
def adapted_tables(model: ModelConfig, adapters: Adapters) -> Mapping[str, Adapted]:
    """Return the embedding and the LM head by block, if they get adapters. Each gets adapters of
    its own, even if both are one table."""
    every = {
        block: _adapted(model, adapters, table) for block, table in token_matrices(model).items()
    }
    return {block: found for block, found in every.items() if found is not None}


def token_matrices(model: ModelConfig) -> dict[str, Module]:
    """Return the embedding and the LM head by block, even if the head shares the embedding's
    table."""
    untied = replace(model, tied_embeddings=False)
    blocks = {"embed": model.arch.embedding(model), "head": model.arch.head(untied)}
    keys = ("embed", "lm_head")
    return {block: m for block, ms in blocks.items() for m in ms if m.key in keys}


def _adapted(model: ModelConfig, adapters: Adapters, matrix: Module) -> Adapted | None:
    """Return a matrix with its adapters; None if it gets none."""
    targets, chosen = adapters.targets, []
    whole = matrix.fused if isinstance(matrix, Matrix) else None
    fused = [] if whole is None else [(whole, 0, whole.rows)]
    for part, start, stop in (*(s for s in matrix.spans if s not in fused), *fused):
        if part.experts and chosen:
            continue
        if isinstance(targets, str):
            named = part.targets if re.fullmatch(targets, part.module) else ()
        else:
            named = tuple(target for target in part.targets if target in targets)
        if named and len(named) < len(part.targets):
            raise ConfigError(
                f"--lora-targets: {', '.join(part.targets)} are one matrix, "
                f"{part.module.rpartition('.')[2]}, of {model.architecture}: name all of them "
                f"or none, got {', '.join(named)}"
            )
        if named:
            step = (stop - start) // max(part.experts, 1)
            rank_and_scale = adapters.of(part.module)
            chosen += [
                AdaptedPart(part, first, first + step, *rank_and_scale)
                for first in range(start, stop, step)
            ]
    if not chosen:
        return None
    columns, groups = matrix.shape[-1], prod(matrix.shape[:-2])
    shape = (prod(matrix.shape) // columns, columns)
    active = matrix.active if isinstance(matrix, Matrix) else 1
    return Adapted(key=matrix.key, parts=tuple(chosen), shape=shape, groups=groups, active=active)


def adapted_in_layers(model: ModelConfig, adapters: Adapters) -> Iterator[tuple[int, Adapted]]:
    """Yield the adapted matrices of all layers, each with its layer's number."""
    for layer in range(model.num_layers):
        for matrix in adapted_matrices(model, adapters, layer):
            yield layer, matrix


def all_adapted(model: ModelConfig, adapters: Adapters) -> Iterator[tuple[str, Adapted]]:
    """Yield all adapted matrices, each with its block's name."""
    tables = adapted_tables(model, adapters)
    yield from ((block, table) for block, table in tables.items() if block == "embed")
    for layer, matrix in adapted_in_layers(model, adapters):
        yield f"layers.{layer}", matrix
    yield from ((block, table) for block, table in tables.items() if block == "head")


def divided_bias(model: ModelConfig, adapters: Adapters) -> str | None:
    """A message if some modules that share a bias have adapters and others have none; else None."""
    for layer, matrix in adapted_in_layers(model, adapters):
        whole = next(m for m in model.matrices(layer) if m.key == matrix.key)
        if whole.bias and len(matrix.parts) < len(whole.parts):
            some = ", ".join(m.rpartition(".")[2] for m in matrix.modules)
            return f"{some} share a bias with others: adapt all of them"
    return None


def adapted_modules(model: ModelConfig, adapters: Adapters | None) -> dict[str, int]:
    """Ranks of all adapters, by module name."""
    matrices = all_adapted(model, adapters) if adapters is not None else ()
    return {part.part.module: part.rank for _, matrix in matrices for part in matrix.parts}


def needed_inputs(model: ModelConfig, config: Options, layer: int) -> set[str]:
    """Keys of a layer's matrices whose gradients, or whose adapters' gradients, need the matrix's
    input."""
    adapters = adapters_of(config)
    if adapters is None:
        return {matrix.key for matrix in model.matrices(layer)}
    return {matrix.key for matrix in adapted_matrices(model, adapters, layer)}


def multiplied_sizes(model: ModelConfig) -> dict[str, int]:
    """Rows and columns of all matrices of blocks, by their names in messages."""
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "width of the query heads": model.num_heads * model.head_dim,
    }
    for matrix in (m for layer in range(model.num_layers) for m in model.matrices(layer)):
        rows, columns = matrix.shape[-2:]
        sizes |= {f"height of {matrix.name}": rows, f"width of {matrix.name}": columns}
    return sizes
