"""Sizes of a new model, and positions of any model: options that override those of --model.

A size that is not given stays the preset's, unless it follows from a given one. Key and value heads
follow the query heads if the preset has equal numbers. A head has width / heads channels, unless
the architecture sets them separately. The MLP's width follows the model's width if the architecture
makes it a multiple.
"""

import json
import re
from dataclasses import replace
from typing import Any

from llmq.arch.experts import Experts
from llmq.arch.model_config import BY_LAYER, ModelConfig
from llmq.arch.rope_scaling import RopeScaling, longest_sequence, read_scaling
from llmq.base.errors import ConfigError
from llmq.options.option_types import POSITIONS_GROUP, SIZES_GROUP
from llmq.options.options import OPTIONS, TrainConfig

_GROUPS = (SIZES_GROUP, POSITIONS_GROUP)
SIZES = tuple(name for name, option in OPTIONS.items() if option.group in _GROUPS)
"""Names of these options: fields of ModelConfig except for _RENAMED and _OF_EXPERTS."""

_RENAMED = {"tie_embeddings": "tied_embeddings"}
_OF_EXPERTS = {"num_experts": "count", "active_experts": "active", "expert_size": "size"}
"""Options that are fields of Experts."""


def given_sizes(config: TrainConfig) -> dict[str, Any]:
    """The sizes that the options set, by field name."""
    values = {name: getattr(config, name) for name in SIZES}
    return {name: value for name, value in values.items() if value is not None}


def resized(model: ModelConfig, given: dict[str, Any]) -> ModelConfig:
    """Return the model with other sizes. given: the result of given_sizes, with vocab_size as a
    number.

    ConfigError, which names the flag, if sizes contradict each other or the architecture.
    """
    if not given:
        return model
    sizes = {_RENAMED.get(name, name): value for name, value in given.items()}
    for name in ("rope_theta", "rope_scaling"):
        if name in sizes and model.positions != "rope":
            flag = OPTIONS[name].flag
            raise ConfigError(f"{flag}: has no effect, this model's positions are learned")
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
    sizes["rope_scaling"] = _scaling(model, longest, sizes.get("rope_scaling"))
    seen = longest_sequence(sizes["rope_scaling"], longest)
    if model.sliding_window is not None and model.sliding_window >= seen:
        sizes["sliding_window"] = None
    layers = sizes.get("num_layers", model.num_layers)
    for name in BY_LAYER:
        each = getattr(model, name)
        sizes[name] = each and _repeated(each, layers)
    if model.shared_keys is not None:  # of the same part of all, the last ones
        own = model.shared_keys.count(False) * layers
        sizes["shared_keys"] = tuple(i * model.num_layers >= own for i in range(layers))
    of_experts = {name: sizes.pop(name) for name in _OF_EXPERTS if name in sizes}
    sizes["experts"] = _experts(model, of_experts, layers)
    if model.mixers is not None:
        sizes["mixers"] = replace(model.mixers, layers=_repeated(model.mixers.layers, layers))
    try:
        return replace(model, **sizes).validate().without_foreign_tokens()
    except ConfigError as error:
        raise ConfigError(_naming_the_flag(str(error))) from None


def _experts(model: ModelConfig, given: dict[str, int], layers: int) -> Experts | None:
    """The experts of a model with `layers` layers."""
    its = model.experts
    if its is None and given:
        raise ConfigError(f"{OPTIONS[next(iter(given))].flag}: this model has no experts")
    if its is None:
        return None
    if "expert_size" in given and its.size is None:
        raise ConfigError(
            f"{OPTIONS['expert_size'].flag}: these experts are as wide as "
            f"{OPTIONS['intermediate_size'].flag} says"
        )
    where = its.layers and _repeated(its.layers, layers)
    sizes = {_OF_EXPERTS[name]: n for name, n in given.items()}
    if model.arch.dense_first:
        where = its.layers and (*its.layers, *(True,) * layers)[:layers]
        shared = its.shared_size // model.expert_size
        sizes["shared_size"] = shared * sizes.get("size", model.expert_size)
    return replace(its, layers=where, **sizes)


def _scaling(model: ModelConfig, longest: int, text: str | None) -> RopeScaling | None:
    """The RoPE scaling of a model with `longest` positions. text: value of --rope-scaling; None: as
    in the model."""
    own = model.rope_scaling
    if text is None:
        grows = own is not None and own.kind == "dynamic"
        return replace(own, original_max_positions=longest) if grows else own
    first = model.max_positions if own is None else own.original_max_positions
    try:
        return read_scaling(json.loads(text), "of", model.arch.rope_kinds, longest, first)
    except ConfigError as error:
        message = str(error).replace("config.json: of.", "").replace("of.", "")
        raise ConfigError(f"{OPTIONS['rope_scaling'].flag}: {message}") from None


def _repeated(pattern: tuple[bool, ...], count: int) -> tuple[bool, ...]:
    """The pattern continued to `count` values, by its shortest period."""
    found = range(1, len(pattern) + 1)
    period = next(p for p in found if all(v == pattern[i % p] for i, v in enumerate(pattern)))
    return tuple(pattern[i % period] for i in range(count))


def _flag(name: str, given: dict[str, Any]) -> str:
    """The flag of a size if given, else of the width, which must agree with it."""
    return OPTIONS[name if name in given else "hidden_size"].flag


def _naming_the_flag(message: str) -> str:
    """A ModelConfig message with the field replaced by its flag."""
    names = {_RENAMED.get(name, name): OPTIONS[name].flag for name in SIZES}
    names["experts"] = OPTIONS["active_experts"].flag
    found = re.match(r"model (\w+): ", message)
    if found is None or found[1] not in names:
        return message
    return f"{names[found[1]]}: {message[found.end() :]}"
