"""Low-rank adapters of a frozen model: their options, and which matrices they are of.

An adapter adds s * B @ A to a matrix (out, in) that stays as it is: A is (rank, in) and B (out,
rank). It is of one module as Hugging Face names it, so that where its files hold queries, keys and
values in one matrix, these three share an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod, sqrt
from pathlib import Path
from typing import Any

from llmq.arch.matrix import Part
from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.options.option_types import (
    LORA_PARTS,
    LORA_TARGETS,
    dtype_option,
    option,
    parse_parts,
    parse_targets,
)
from llmq.options.sizes import SizeFields

_GROUP = "Adapters (LoRA)"

QUANTIZED = ("e4m3", "int8", "nf4")
"""Formats of --base-dtype in which weights are codes with scales."""


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False, eq=False)
class AdapterFields(SizeFields):
    """Fields, and those of adapters."""

    lora_rank: int = option(
        _GROUP, 0, "Train adapters of this rank and leave the model as it is; 0: no", min=0
    )
    lora_alpha: float | None = option(
        _GROUP, None, "Numerator of the adapters' scaling; as --lora-rank if not given"
    )
    lora_targets: str | None = option(
        _GROUP,
        None,
        f"Matrices that get adapters, all or some of {','.join(LORA_TARGETS)}; all if not given",
        parse=parse_targets,
    )
    lora_dropout: float | None = option(
        _GROUP,
        None,
        "Part of the adapters' inputs that training sets to zero; 0 if not given",
        min=0,
    )
    lora_scaling: str | None = option(
        _GROUP,
        None,
        "Scaling of the adapters; standard, if not given: alpha / rank, rs: alpha / sqrt(rank)",
        choices=("standard", "rs"),
    )
    lora_init: str | None = option(
        _GROUP,
        None,
        "What the adapters begin with; zero, if not given: nothing; pissa: the principal singular "
        "values of each matrix, of which the rest stays as the model",
        choices=("zero", "pissa"),
    )
    lora_plus: float = option(_GROUP, 1.0, "Learning rate of the adapters' B over that of A")
    base_dtype: str | None = dtype_option(
        _GROUP,
        None,
        "Format in which the blocks' matrices beside the adapters are kept; as --model-dtype if "
        "not given. e4m3: 8 bits, for fp8 products; int8: 8 bits, for products of cards without "
        "fp8; nf4: 4 bits in blocks of 64, as QLoRA's",
        *QUANTIZED,
    )
    adapter: Path | None = option(
        _GROUP,
        None,
        "Directory of adapters in PEFT's format to go on from; what is not given is as there",
    )
    train: tuple[str, ...] | None = option(
        _GROUP,
        None,
        f"Parts of the model that are trained beside adapters, some of {','.join(LORA_PARTS)}",
        parse=parse_parts,
    )

    @property
    def is_quantized(self) -> bool:
        """Whether the model beside the adapters is kept as codes."""
        return bool(self.lora_rank) and self.base_dtype in QUANTIZED

    @property
    def splits_model(self) -> bool:
        """Whether adapters begin as a part of the model, and only the rest of it stays."""
        return bool(self.lora_rank) and self.lora_init == "pissa"

    @property
    def lora_scale(self) -> float:
        """The factor of B @ A."""
        root = sqrt(self.lora_rank) if self.lora_scaling == "rs" else self.lora_rank
        return self.lora_alpha / root


_OWN = {f.name: f.default for f in fields(AdapterFields) if f.metadata["group"] == _GROUP}
"""Options of adapters, and their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """What is trained of a model whose matrices stay as they are; decides about its weight table.

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


def adapters_of(config: AdapterFields) -> Adapters | None:
    """Of a run; None where all of the model is trained. config: normalized."""
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


def implied_values(values: dict[str, Any]) -> dict[str, Any]:
    """By field, what options of adapters mean that were not given; {} without --lora-rank."""
    if not values["lora_rank"]:
        return {}
    implied = {
        "lora_alpha": float(values["lora_rank"]),
        "lora_targets": "all",
        "lora_dropout": 0.0,
        "lora_scaling": "standard",
        "lora_init": "zero",
        "base_dtype": values["model_dtype"],
        "train": (),
    }
    return {name: value for name, value in implied.items() if values[name] is None}


def implied_products(values: dict[str, Any]) -> str:
    """--matmul-dtype where it was not given: 8-bit codes are multiplied as they are."""
    adapts = values["lora_rank"] or values["adapter"] is not None
    base, dtype = values["base_dtype"], values["model_dtype"]
    return base if adapts and dtype == "bf16" and base in ("e4m3", "int8") else dtype


def check_adapters(config: AdapterFields) -> None:
    """ConfigError for options of adapters that are out of range or need another one."""
    if config.adapter is not None and config.from_scratch:
        raise ConfigError("--adapter: needs the model that it adapts, not --from-scratch")
    if config.lora_init == "pissa":
        _check_principal(config)
    if not config.lora_rank and config.adapter is None:
        for name, default in _OWN.items():
            if getattr(config, name) != default:
                raise ConfigError(f"--{name.replace('_', '-')}: needs --lora-rank")
        return
    if config.lora_dropout is not None and config.lora_dropout >= 1:
        raise ConfigError(f"--lora-dropout: must be less than 1, got {config.lora_dropout}")
    for name in ("lora_alpha", "lora_plus"):
        if getattr(config, name) is not None and getattr(config, name) <= 0:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: must be greater than 0, got {getattr(config, name)}")
    if config.lora_rank and config.base_dtype not in (config.model_dtype, *QUANTIZED):
        raise ConfigError(
            f"--base-dtype: {config.base_dtype} does not go with --model-dtype "
            f"{config.model_dtype}, use {' or '.join((config.model_dtype, *QUANTIZED))}"
        )


def _check_principal(config: AdapterFields) -> None:
    """ConfigError where adapters cannot begin with a part of the model."""
    if config.adapter is not None:
        raise ConfigError(
            "--lora-init: pissa does not go with --adapter, whose adapters have begun already"
        )
    if config.from_scratch:
        raise ConfigError(
            "--lora-init: pissa takes the adapters from a model that was trained, not from the "
            "random one of --from-scratch"
        )


def check_adapters_with(config: AdapterFields, model: ModelConfig) -> None:
    """ConfigError for adapters that the model cannot have. config: normalized."""
    adapters = adapters_of(config)
    if adapters is None:
        if config.adapter is not None:
            raise ConfigError("--adapter: is not read here: give --lora-rank instead")
        return
    matrices = [matrix for _, matrix in all_adapted(model, adapters.targets)]
    named = () if config.lora_targets == "all" else adapters.targets
    missing = [target for target in named if not has_target(model, target)]
    if missing:
        raise ConfigError(f"--lora-targets: {model.architecture} has no {', '.join(missing)}")
    for matrix in matrices:
        for module, (start, stop) in zip(matrix.modules, matrix.spans, strict=True):
            least = min(stop - start, matrix.shape[1])
            if config.lora_rank > least:
                raise ConfigError(
                    f"--lora-rank: {config.lora_rank} is larger than the matrix of "
                    f"{module.rpartition('.')[2]}, {stop - start} x {matrix.shape[1]}: "
                    + (
                        f"use at most {least}, or leave it out of --lora-targets"
                        if config.adapter is None
                        else f"`llmq merge` '{config.adapter}', and begin with new adapters"
                    )
                )
    if config.is_quantized:
        _check_blocks(config, model)
    if "head" in adapters.train and model.tied_embeddings:
        raise ConfigError("--train: the head is the embedding in this model: name embeddings")


def _check_blocks(config: AdapterFields, model: ModelConfig) -> None:
    """ConfigError for matrices that codes cannot be made of."""
    if config.base_dtype == "int8":
        _check_rows(model)
        return
    multiple = {"e4m3": 16, "nf4": 64}[config.base_dtype]  # elements
    C, F, Hd = model.hidden_size, model.intermediate_size, model.head_dim
    sizes = {
        "queries": C * model.num_heads * Hd,
        "keys": C * model.num_kv_heads * Hd,
        "the MLP": C * F,
    }
    for matrix in (m for layer in range(model.num_layers) for m in model.matrices(layer)):
        sizes |= {part.module: part.rows * matrix.shape[-1] for part in matrix.parts}
    for name, size in sizes.items():
        if size % multiple:
            raise ConfigError(
                f"--base-dtype: {config.base_dtype} needs matrices of multiples of {multiple} "
                f"elements, that of {name} has {size}"
            )


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


def _check_rows(model: ModelConfig) -> None:
    """ConfigError for matrices that have no codes with a scale for each row."""
    for name, size in multiplied_sizes(model).items():
        if size % 16:
            raise ConfigError(f"--base-dtype: int8 needs multiples of 16, but the {name} is {size}")
