"""Qwen3.5 (text) with experts in all layers: the models whose names have an A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, size
from llmq.arch.experts import WithExperts
from llmq.arch.qwen3_5 import Qwen35


class Qwen35Moe(WithExperts, Qwen35):
    """Released files hold a layer's experts as one parameter. No layer has an MLP, so that the
    model's intermediate_size is that of experts."""

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
        """The only width is that of experts."""
        return super().read_sizes({**hf, "intermediate_size": size(hf, "moe_intermediate_size")})

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """Likewise."""
        fields = super().write_sizes(model)
        return fields | {"moe_intermediate_size": fields.pop("intermediate_size")}
