"""Mistral: Llama without biases, with a window in all layers.

Mixtral is Mistral with experts in all layers, mostly without a window.
"""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, reject, size
from llmq.arch.experts import WithExperts
from llmq.arch.rope_family import FULL, WINDOWED, RopeFamily


class Mistral(RopeFamily):
    """A config without sliding_window means one of 4096."""

    name = "MistralForCausalLM"
    model_type = "mistral"
    label = "Mistral"
    gguf = GgufKind("llama", pairs=True, heads=True)
    windowed = True
    sliding_window = 4096
    bos_token_id = 1
    eos_token_id = 2

    def write_sizes(self, model: Any) -> dict[str, Any]:
        return super().write_sizes(model) | {"sliding_window": model.sliding_window}


class Ministral(Mistral):
    """Layers without a window are named by layer_types; without the field all have one."""

    name = "MinistralForCausalLM"
    model_type = "ministral"
    label = "Ministral"
    gguf = None
    own_fields = ("windowed_layers",)
    full_every = 4

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        window = hf.get("sliding_window", self.sliding_window)
        kinds = [FULL if window is None else WINDOWED] * size(hf, "num_hidden_layers")
        given = dict(hf) if hf.get("layer_types") else dict(hf) | {"layer_types": kinds}
        return super().read_sizes(given)


_AT = "model.layers.{}.block_sparse_moe"


class Mixtral(WithExperts, Mistral):
    """The weights of the active experts always have the sum 1."""

    name = "MixtralForCausalLM"
    model_type = "mixtral"
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
        """Inputs of routers get no noise."""
        reject(hf, "router_jitter_noise", 0, None)
        return super().read_sizes({"rope_theta": 1e6, **hf})
