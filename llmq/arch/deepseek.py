"""DeepSeek-V2 and V3, and GLM-4.7-Flash: latent attention, MLPs in the first layers, and experts
with a shared expert in all later layers. Kimi-K2 and Moonlight have the architecture of V3."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, get, reject, size
from llmq.arch.glm4_moe import Glm4Moe
from llmq.arch.latent import LATENT_SIZES, LATENT_TARGETS, LatentAttention, latent_attention
from llmq.arch.matrix import HalfSpec
from llmq.base.errors import ConfigError

_METHODS = ("greedy", "group_limited_greedy")
"""Values of topk_method for routers of DeepSeek-V2: without groups of experts, and with groups."""


class DeepseekV3(Glm4Moe):
    """DeepSeek-V3: for each token, the router chooses groups of experts, then experts of these
    groups."""

    name = "DeepseekV3ForCausalLM"
    classifier = "DeepseekV3ForSequenceClassification"
    model_type = "deepseek_v3"
    label = "DeepSeek-V3"
    gguf = GgufKind("deepseek2", heads=True, routers=True)
    bos_token_id = 0
    eos_token_id = 1
    partial_rotary = False
    qkv_bias = False
    norm_eps = 1e-6
    head_dim = 256
    dense_layers = 3
    """Default number of first layers that have an MLP in place of experts."""
    defaults: Mapping[str, Any] = {
        "q_lora_rank": 1536, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5
    }  # fmt: skip
    """Defaults in transformers of fields that config.json may lack."""
    own_fields = ("latent",)
    targets = (*Glm4Moe.targets, *LATENT_TARGETS)

    def layers(self, model: Any, layer: int) -> tuple[HalfSpec, ...]:
        _, second = super().layers(model, layer)
        return latent_attention(model, layer), second

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        heads, given = size(hf, "num_attention_heads"), {**self.defaults, **hf}
        reject(hf, "rope_interleave", True)
        reject(hf, "attention_bias", False, None)
        reject(hf, "num_key_value_heads", heads, None)
        queries = get(given, "q_lora_rank", int, None)
        sizes = {key: size(given, name) for key, name in list(LATENT_SIZES.items())[1:]}
        latent = LatentAttention(query_rank=queries, **sizes)
        own = {"head_dim": latent.head_dim, "num_key_value_heads": heads}
        fields = super().read_sizes(given | own | {"partial_rotary_factor": 1.0})
        return fields | {"latent": latent}

    def _read_layers(self, hf: Mapping[str, Any]) -> tuple[bool, ...]:
        return super()._read_layers({"first_k_dense_replace": self.dense_layers, **hf})

    def fixed(self, model: Any) -> dict[str, Any]:
        if model.latent is None:
            raise ConfigError(f"model latent: {self.name} needs its sizes")
        own = {"num_kv_heads": model.num_heads, "head_dim": model.latent.head_dim}
        return super().fixed(model) | own | {"partial_rotary_factor": 1.0}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """Return config.json's fields without head_dim, because transformers reads head_dim as
        qk_rope_head_dim."""
        fields = super().write_sizes(model)
        for name in ("head_dim", "use_qk_norm"):
            del fields[name]
        sizes = {name: getattr(model.latent, key) for key, name in LATENT_SIZES.items()}
        return fields | sizes | {"rope_interleave": True, "attention_bias": False}


class DeepseekV2(DeepseekV3):
    """DeepSeek-V2: routers compute a softmax, and experts' weights are not renormalized."""

    name = "DeepseekV2ForCausalLM"
    classifier = "DeepseekV2ForSequenceClassification"
    model_type = "deepseek_v2"
    label = "DeepSeek-V2"
    gguf = DeepseekV3.gguf
    bos_token_id = 1
    eos_token_id = 2
    sigmoid = False
    dense_layers = 0
    defaults: Mapping[str, Any] = {"q_lora_rank": 1536, "n_shared_experts": 2}

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes without renormalization, because transformers never divides this family's
        weights by their sum."""
        reject(hf, "topk_method", *_METHODS)
        if hf.get("topk_method", _METHODS[0]) == _METHODS[0]:
            hf = {**hf, "n_group": 1, "topk_group": 1}
        reject(hf, "norm_topk_prob", False, None)
        reject(hf, "mlp_bias", False, None)
        return super().read_sizes({**hf, "norm_topk_prob": False})

    def write_sizes(self, model: Any) -> dict[str, Any]:
        method = _METHODS[model.experts.groups > 1]
        return super().write_sizes(model) | {"topk_method": method}


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash: config.json may list the layers with experts."""

    name = "Glm4MoeLiteForCausalLM"
    classifier = None
    model_type = "glm4_moe_lite"
    label = "GLM-4-MoE-Lite"
    gguf = DeepseekV3.gguf
    norm_eps = 1e-5
    dense_layers = 1
    defaults: Mapping[str, Any] = {"q_lora_rank": 768, "routed_scaling_factor": 1.8}

    def _read_layers(self, hf: Mapping[str, Any]) -> tuple[bool, ...]:
        kinds = get(hf, "mlp_layer_types", list, None)
        if kinds is None:
            return super()._read_layers(hf)
        if len(kinds) != size(hf, "num_hidden_layers"):
            raise ConfigError(f"config.json: mlp_layer_types: expected one a layer, got {kinds!r}")
        return tuple(kind == "sparse" for kind in kinds)

    def write_sizes(self, model: Any) -> dict[str, Any]:
        sparse = [model.has_experts(layer) for layer in range(model.num_layers)]
        kinds = ["sparse" if each else "dense" for each in sparse]
        return super().write_sizes(model) | {"mlp_layer_types": kinds}
