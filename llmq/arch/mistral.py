"""Mistral: Llama without biases and with a window in all layers. Ministral 3 has no window.

Mixtral is Mistral with experts in all layers, and mostly without windows.
"""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, get, reject, size
from llmq.arch.experts import WithExperts
from llmq.arch.rope_family import FULL, WINDOWED, RopeFamily
from llmq.arch.rope_scaling import FIRST


class Mistral(RopeFamily):
    """Mistral: sliding_window defaults to 4096."""

    name = "MistralForCausalLM"
    model_type = "mistral"
    wrapper: str | None = "Mistral3ForConditionalGeneration"
    label = "Mistral"
    gguf = GgufKind("llama", pairs=True, heads=True)
    windowed = True
    sliding_window = 4096
    bos_token_id = 1
    eos_token_id = 2

    def write_sizes(self, model: Any) -> dict[str, Any]:
        return super().write_sizes(model) | {"sliding_window": model.sliding_window}


class Ministral(Mistral):
    """Ministral: layer_types lists layers without a window; without the field all layers have the
    window."""

    name = "MinistralForCausalLM"
    model_type = "ministral"
    wrapper = None
    label = "Ministral"
    gguf = None
    own_fields = ("windowed_layers",)
    full_every = 4

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        window = hf.get("sliding_window", self.sliding_window)
        kinds = [FULL if window is None else WINDOWED] * size(hf, "num_hidden_layers")
        given = dict(hf) if hf.get("layer_types") else dict(hf) | {"layer_types": kinds}
        return super().read_sizes(given)


_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, FIRST: 16384, "mscale": 1.0}
_YARN |= {"mscale_all_dim": 1.0}
_GROWTH = "llama_4_scaling_beta"


class Ministral3(Mistral):
    """Ministral 3: YaRN, and queries that grow with the logarithm of their position."""

    name = "Ministral3ForCausalLM"
    model_type = "ministral3"
    label = "Ministral3"
    gguf = GgufKind("mistral3", pairs=True, heads=True)
    own_fields = ("query_growth",)
    rope_kinds = ("yarn",)
    head_dim = 128
    sliding_window = None
    norm_eps = 1e-5
    pad_token_id = 11

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        given = {"rope_parameters": _YARN | {_GROWTH: 0.1}, **hf}
        rope = given.get("rope_scaling") or get(given, "rope_parameters", dict)
        return super().read_sizes(given) | {"query_growth": get(rope, _GROWTH, float, None)}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """Return config.json's fields, with two numbers that transformers requires."""
        fields, growth = super().write_sizes(model), {_GROWTH: model.query_growth or 0.0}
        fields["rope_parameters"] = (
            {FIRST: model.max_positions} | fields["rope_parameters"] | growth
        )
        if fields["rope_scaling"] is not None:
            fields["rope_scaling"] = fields["rope_scaling"] | growth
        return fields


_AT = "model.layers.{}.block_sparse_moe"


class Mixtral(WithExperts, Mistral):
    """Mixtral: the weights of a token's active experts always have the sum 1."""

    name = "MixtralForCausalLM"
    model_type = "mixtral"
    wrapper = None
    label = "Mixtral"
    gguf = GgufKind("llama", pairs=True, heads=True, renormalize=True)
    count_names = ("num_local_experts",)
    own_size = False
    renormalized = True
    sliding_window = None
    norm_eps = 1e-5
    expert_modules: Mapping[str, tuple[str, ...]] = {
        "router": (f"{_AT}.gate",),
        "experts_up": (f"{_AT}.experts.{{}}.w3", f"{_AT}.experts.{{}}.w1"),
        "experts_down": (f"{_AT}.experts.{{}}.w2",),
    }

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes; router noise is rejected."""
        reject(hf, "router_jitter_noise", 0, None)
        return super().read_sizes({"rope_theta": 1e6, **hf})
