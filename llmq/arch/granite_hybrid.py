"""Granite 4 hybrid: Granite with state spaces in most layers, and attention without positions."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, get, reject, size
from llmq.arch.experts import WithExperts
from llmq.arch.granite import Granite
from llmq.arch.mamba import MAMBA_TARGETS, NO_LIMIT, Mamba, mamba_modules
from llmq.arch.rope_family import FULL, RopeFamily
from llmq.base.errors import ConfigError

_SPACES, _ATTENTION = ("mamba", "linear_attention"), ("attention", FULL)
"""Words that layer_types may have; the first word of each tuple is written."""
_AT = "model.layers.{}"


class GraniteHybrid(WithExperts, Granite):
    """Granite 4 models with experts and without. For models without experts, config.json gives the
    MLP's width as the width of a shared expert."""

    name = "GraniteMoeHybridForCausalLM"
    model_type = "granitemoehybrid"
    label = "Granite 4 hybrid"
    gguf = GgufKind("granitehybrid", pairs=True, renormalize=True, factors=True)
    mlp_bias = False
    own_fields = (*Granite.own_fields, "mixers", "rope_layers")
    gate_first = True
    modules = RopeFamily.modules | mamba_modules(f"{_AT}.mamba") | {
        "up": (f"{_AT}.shared_mlp.input_linear",),
        "down": (f"{_AT}.shared_mlp.output_linear",),
    }  # fmt: skip
    targets = (*WithExperts.targets, *MAMBA_TARGETS)
    count_names = ("num_local_experts",)
    own_size = False
    renormalized = True
    shares = True
    shared_gated = False
    stacked = True
    experts_at = f"{_AT}.block_sparse_moe.experts"
    expert_modules: Mapping[str, tuple[str, ...]] = {
        "router": (f"{_AT}.block_sparse_moe.router.layer",),
        "experts_up": (f"{_AT}.block_sparse_moe.input_linear.weight",),
        "experts_down": (f"{_AT}.block_sparse_moe.output_linear.weight",),
        "shared_up": modules["up"],
        "shared_down": modules["down"],
    }

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        reject(hf, "mamba_proj_bias", False, None)
        reject(hf, "time_step_limit", *NO_LIMIT)
        count, hidden = size(hf, "num_hidden_layers"), size(hf, "hidden_size")
        shared = size({"shared_intermediate_size": 1024, **hf}, "shared_intermediate_size")
        own = {"layer_types": None, "shared_expert_intermediate_size": shared}
        if get(hf, "num_local_experts", int, 8):
            experts = {"num_local_experts": 8, "num_experts_per_tok": 2, **hf}
            found = super().read_sizes({**experts, **own})
        else:
            found = Granite.read_sizes(self, {**hf, **own, "intermediate_size": shared})
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
        if model.experts is None:
            return Granite.fixed(self, model)
        return super().fixed(model)

    def write_sizes(self, model: Any) -> dict[str, Any]:
        its, layers = model.mixers, range(model.num_layers)
        if model.experts is None:
            none = {"num_local_experts": 0, "num_experts_per_tok": 0}
            fields = Granite.write_sizes(self, model) | none
            fields["shared_intermediate_size"] = fields["intermediate_size"]
        else:
            fields = super().write_sizes(model)
            fields["shared_intermediate_size"] = fields.pop("shared_expert_intermediate_size")
        fields |= {
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
    """Return True for each layer with a state space; without layer_types all layers have state
    spaces."""
    kinds = get(hf, "layer_types", list, None) or [_SPACES[0]] * count
    if len(kinds) != count or any(kind not in _SPACES + _ATTENTION for kind in kinds):
        raise ConfigError(
            f"config.json: layer_types: expected {count} of {_SPACES[0]!r} and {_ATTENTION[0]!r}, "
            f"got {kinds!r}"
        )
    return tuple(kind in _SPACES for kind in kinds)
