"""Qwen3.5 (text): three of four layers have gated delta nets, the others gated attention.

Models with an A in their name, such as 35B-A3B, have experts in all layers.
"""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, get, reject, size
from llmq.arch.delta import DELTA_MODULES, DELTA_TARGETS, DeltaNet
from llmq.arch.experts import WithExperts
from llmq.arch.mtp import QWEN
from llmq.arch.rope_family import FULL, RopeFamily, all_but_every
from llmq.base.errors import ConfigError

LINEAR = "linear_attention"
_SIZES = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}
"""By field of DeltaNet, the field's name in config.json and its default."""


class Qwen35(RopeFamily):
    """Qwen3.5: the norms' weights are stored minus 1, except for norms after delta nets. RoPE
    rotates a quarter of each head. Positions have three axes for images; in text the three axes are
    equal."""

    name = "Qwen3_5ForCausalLM"
    classifier = "Qwen3_5TextForSequenceClassification"
    model_type = "qwen3_5_text"
    wrapper = "Qwen3_5ForConditionalGeneration"
    text_defaults: Mapping[str, Any] = {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    }
    label = "Qwen3.5"
    gguf = GgufKind("qwen35", heads=True, heads_in_turns=True)
    norm_offset = True
    gated_attention = True
    qk_norm = True
    mtp = QWEN
    qkv_bias = None
    o_bias = None
    head_dim = 256
    wrapper_tokenizer_class = "Qwen3_5Tokenizer"
    own_fields = ("mixers",)
    rope_kinds = ("linear", "yarn")
    partial_rotary = True
    modules = RopeFamily.modules | DELTA_MODULES
    targets = (*RopeFamily.targets, *DELTA_TARGETS)

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        reject(hf, "attn_output_gate", True, None)
        own = {name: value for name, value in hf.items() if name != "layer_types"}
        found = super().read_sizes({"partial_rotary_factor": 0.25} | own)
        layers = _delta_layers(hf, found["num_layers"])
        sizes = {
            field: size({name: default} | own, name) for field, (name, default) in _SIZES.items()
        }
        return found | {"mixers": DeltaNet(**sizes, layers=layers) if any(layers) else None}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        fields, net = super().write_sizes(model), model.mixers
        kinds = [LINEAR if model.has_mixer(layer) else FULL for layer in range(model.num_layers)]
        sizes = {
            name: default if net is None else getattr(net, field)
            for field, (name, default) in _SIZES.items()
        }
        return fields | sizes | {"layer_types": kinds, "attn_output_gate": True}


def _delta_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with a delta net, from layer_types or from the older
    full_attention_interval."""
    kinds = get(hf, "layer_types", list, None)
    if kinds is None:
        every = size(hf, "full_attention_interval") if "full_attention_interval" in hf else 4
        return all_but_every(every, num_layers)
    if len(kinds) != num_layers or any(kind not in (LINEAR, FULL) for kind in kinds):
        raise ConfigError(
            f"config.json: layer_types: expected {num_layers} of {LINEAR!r} and {FULL!r}, "
            f"got {kinds!r}"
        )
    return tuple(kind == LINEAR for kind in kinds)


class Qwen35Moe(WithExperts, Qwen35):
    """Qwen3.5-MoE: released files store each matrix of all experts of a layer as one parameter. No
    layer has an MLP; intermediate_size is the width of the experts."""

    name = "Qwen3_5MoeForCausalLM"
    classifier = None
    model_type = "qwen3_5_moe_text"
    wrapper = "Qwen3_5MoeForConditionalGeneration"
    own_tokenizer_class = "Qwen3_5Tokenizer"
    text_defaults: Mapping[str, Any] = {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    }
    label = "Qwen3.5-MoE"
    gguf = GgufKind("qwen35moe", heads=True, heads_in_turns=True, renormalize=True)
    targets = tuple(dict.fromkeys((*WithExperts.targets, *Qwen35.targets)))
    own_size = False
    renormalized = True
    shares = True

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes, with the experts' width as intermediate_size."""
        return super().read_sizes({**hf, "intermediate_size": size(hf, "moe_intermediate_size")})

    def write_sizes(self, model: Any) -> dict[str, Any]:
        fields = super().write_sizes(model)
        return fields | {"moe_intermediate_size": fields.pop("intermediate_size")}
