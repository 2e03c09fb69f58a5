"""Own sizes of a new model: the options that change those of a preset, and what follows from them.

A size that is not given stays the preset's, except where it follows from one that is given: as many
key and value heads as query heads where the preset has as many; the head size is the width divided
by the heads, unless the architecture or the preset sets it apart; an MLP that the architecture
makes a multiple of the width stays one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.options.option_types import Option, option, options_of, parse_vocab_size
from llmq.options.safety_fields import SafetyFields

_GROUP = "Own sizes of a new model, instead of those of --model"


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False, eq=False)
class SizeFields(SafetyFields):
    """SafetyFields, and the sizes that replace those of --model; None: as they are there."""

    vocab_size: int | str | None = option(
        _GROUP,
        None,
        "Token ids; auto: as many as the tokenizer of the training files has",
        parse=parse_vocab_size,
    )
    hidden_size: int | None = option(_GROUP, None, "Channels of the residual stream", min=1)
    intermediate_size: int | None = option(_GROUP, None, "Width of the MLP", min=1)
    num_layers: int | None = option(
        _GROUP, None, "Transformer blocks", alias="num-hidden-layers", min=1
    )
    num_heads: int | None = option(_GROUP, None, "Query heads", alias="num-attention-heads", min=1)
    num_kv_heads: int | None = option(
        _GROUP, None, "Key and value heads", alias="num-key-value-heads", min=1
    )
    head_dim: int | None = option(_GROUP, None, "Channels of one head", min=1)
    max_positions: int | None = option(
        _GROUP, None, "Longest sequence in tokens", alias="max-position-embeddings", min=1
    )
    rope_theta: float | None = option(_GROUP, None, "Base of the rotary frequencies")
    tie_embeddings: bool | None = option(
        _GROUP, None, "Use the embedding matrix as LM head", alias="tie-word-embeddings"
    )


SIZES = tuple(f.name for f in fields(SizeFields) if f.metadata["group"] == _GROUP)
"""Names of these fields, which are those of ModelConfig but for _RENAMED."""

_RENAMED = {"tie_embeddings": "tied_embeddings"}
_OPTIONS: dict[str, Option] = {n: o for n, o in options_of(SizeFields).items() if n in SIZES}


def given_sizes(config: SizeFields) -> dict[str, Any]:
    """The sizes that the options set, by field of SizeFields."""
    values = {name: getattr(config, name) for name in SIZES}
    return {name: value for name, value in values.items() if value is not None}


def check_from_scratch(config: SizeFields) -> None:
    """ConfigError for a size without --from-scratch: weights that are there have theirs."""
    for name in given_sizes(config):
        if not config.from_scratch:
            raise ConfigError(
                f"{_OPTIONS[name].flag}: needs --from-scratch: the weights of --model have their "
                "own sizes"
            )


def resized(model: ModelConfig, given: dict[str, Any]) -> ModelConfig:
    """The model with other sizes. given: of given_sizes, vocab_size a number.

    ConfigError, naming the flag at fault, where they contradict each other or the architecture.
    """
    if not given:
        return model
    sizes = {_RENAMED.get(name, name): value for name, value in given.items()}
    if "rope_theta" in sizes and model.positions != "rope":
        raise ConfigError("--rope-theta: has no effect, this model's positions are learned")
    hidden = sizes.setdefault("hidden_size", model.hidden_size)
    heads = sizes.setdefault("num_heads", model.num_heads)
    if model.num_kv_heads == model.num_heads:
        sizes.setdefault("num_kv_heads", heads)
    elif "num_kv_heads" not in sizes and heads % model.num_kv_heads:
        raise ConfigError(
            f"{_flag('num_heads', given)}: {heads} heads are no multiple of the "
            f"{model.num_kv_heads} key and value heads of --model: give --num-kv-heads too"
        )
    if model.arch.head_dim is None and model.head_dim * model.num_heads == model.hidden_size:
        if "head_dim" not in sizes and hidden % heads:
            raise ConfigError(
                f"{_flag('num_heads', given)}: {heads} heads do not divide the hidden size "
                f"{hidden}: choose others, or give --head-dim too"
            )
        sizes.setdefault("head_dim", hidden // heads)
    factor = model.arch.mlp_factor
    if factor is not None and model.intermediate_size == factor * model.hidden_size:
        sizes.setdefault("intermediate_size", factor * hidden)
    longest = sizes.get("max_positions", model.max_positions)
    if model.sliding_window is not None and model.sliding_window >= longest:
        sizes["sliding_window"] = None
    if model.windowed_layers is not None:
        layers = sizes.get("num_layers", model.num_layers)
        sizes["windowed_layers"] = _repeated(model.windowed_layers, layers)
    try:
        return replace(model, **sizes).validate().without_foreign_tokens()
    except ConfigError as error:
        raise ConfigError(_naming_the_flag(str(error))) from None


def _repeated(pattern: tuple[bool, ...], count: int) -> tuple[bool, ...]:
    """So many values, which go on as the pattern, of which the shortest period counts."""
    found = range(1, len(pattern) + 1)
    period = next(p for p in found if all(v == pattern[i % p] for i, v in enumerate(pattern)))
    return tuple(pattern[i % period] for i in range(count))


def _flag(name: str, given: dict[str, Any]) -> str:
    """The flag of a size if it was given, else that of the width, with which it has to agree."""
    return _OPTIONS[name if name in given else "hidden_size"].flag


def _naming_the_flag(message: str) -> str:
    """A message of ModelConfig about one of its fields, about the flag that sets it."""
    names = {_RENAMED.get(name, name): option.flag for name, option in _OPTIONS.items()}
    found = re.match(r"model (\w+): ", message)
    if found is None or found[1] not in names:
        return message
    return f"{names[found[1]]}: {message[found.end() :]}"
