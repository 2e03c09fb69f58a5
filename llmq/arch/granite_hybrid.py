"""Granite 4 hybrid: Granite with state spaces in most layers, and attention without positions."""

from collections.abc import Mapping
from math import inf
from typing import Any

from llmq.arch.common import get, reject, size
from llmq.arch.granite import Granite
from llmq.arch.mamba import MAMBA_TARGETS, Mamba, mamba_modules
from llmq.arch.rope_family import FULL, RopeFamily
from llmq.base.errors import ConfigError

_SPACES, _ATTENTION = ("mamba", "linear_attention"), ("attention", FULL)
"""Names in layer_types; the first one of each is written."""
_NO_LIMIT = (None, [0.0, inf], [0.0, {"__float__": "Infinity"}])  # of transformers 5 the last one
_AT = "model.layers.{}"


class GraniteHybrid(Granite):
    """Dense sizes. The width of the MLP is that of the shared expert in its config."""

    name = "GraniteMoeHybridForCausalLM"
    model_type = "granitemoehybrid"
    label = "Granite 4 hybrid"
    mlp_bias = False
    own_fields = (*Granite.own_fields, "mixers", "rope_layers")
    gate_first = True
    modules = RopeFamily.modules | mamba_modules(f"{_AT}.mamba") | {
        "up": (f"{_AT}.shared_mlp.input_linear",),
        "down": (f"{_AT}.shared_mlp.output_linear",),
    }  # fmt: skip
    targets = (*Granite.targets, *MAMBA_TARGETS)

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        reject(hf, "mamba_proj_bias", False, None)
        reject(hf, "time_step_limit", *_NO_LIMIT)
        reject(hf, "num_local_experts", 0)
        hf = {"num_local_experts": 8, **hf}
        count, hidden = size(hf, "num_hidden_layers"), size(hf, "hidden_size")
        own = {"intermediate_size": size(hf, "shared_intermediate_size"), "layer_types": None}
        found = super().read_sizes({**hf, **own})
        if get(hf, "position_embedding_type", str, None) != "rope":
            found["rope_layers"] = (False,) * count
        layers = kinds_of(hf, count)
        if not any(layers):
            return found
        heads = size({"mamba_n_heads": 128, **hf}, "mamba_n_heads")
        inner = size({"mamba_expand": 2, **hf}, "mamba_expand") * hidden
        if hf.get("mamba_d_head", "auto") not in ("auto", inner / heads) or inner % heads:
            raise ConfigError(
                f"config.json: mamba_d_head: {heads} heads of it must be {inner} channels, "
                f"got {hf.get('mamba_d_head')!r}"
            )
        found["mixers"] = Mamba(
            key_heads=size({"mamba_n_groups": 1, **hf}, "mamba_n_groups"),
            key_dim=size({"mamba_d_state": 256, **hf}, "mamba_d_state"),
            value_heads=heads,
            value_dim=inner // heads,
            taps=size({"mamba_d_conv": 4, **hf}, "mamba_d_conv"),
            conv_bias=get(hf, "mamba_conv_bias", bool, True),
            layers=layers,
        )
        return found

    def fixed(self, model: Any) -> dict[str, Any]:
        if model.mixers is not None and model.mixers.values % model.hidden_size:
            raise ConfigError(
                f"model hidden_size: {model.hidden_size} must divide the {model.mixers.values} "
                "channels of its state spaces"
            )
        return super().fixed(model)

    def write_sizes(self, model: Any) -> dict[str, Any]:
        fields, its = super().write_sizes(model), model.mixers
        layers = range(model.num_layers)
        fields |= {
            "shared_intermediate_size": fields["intermediate_size"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "nope" if model.rope_layers else "rope",
            "layer_types": [(_SPACES if model.has_mixer(i) else _ATTENTION)[0] for i in layers],
        }
        if its is None:
            return fields
        return fields | {
            "mamba_n_groups": its.key_heads,
            "mamba_d_state": its.key_dim,
            "mamba_n_heads": its.value_heads,
            "mamba_d_head": its.value_dim,
            "mamba_expand": its.values // model.hidden_size,
            "mamba_d_conv": its.taps,
            "mamba_conv_bias": its.conv_bias,
            "mamba_proj_bias": False,
            "mamba_chunk_size": 256,
        }


def kinds_of(hf: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Whether each layer has a state space; without layer_types all have."""
    kinds = get(hf, "layer_types", list, None) or [_SPACES[0]] * count
    if len(kinds) != count or any(kind not in _SPACES + _ATTENTION for kind in kinds):
        raise ConfigError(
            f"config.json: layer_types: expected {count} of {_SPACES[0]!r} and {_ATTENTION[0]!r}, "
            f"got {kinds!r}"
        )
    return tuple(kind in _SPACES for kind in kinds)
