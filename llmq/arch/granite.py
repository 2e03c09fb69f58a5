"""Granite: Llama with multipliers of embeddings, attention scores, residual branches and logits."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import MULTIPLIERS, GgufKind, get
from llmq.arch.rope_family import RopeFamily


class Granite(RopeFamily):
    """Granite: attention_bias and mlp_bias decide on biases, as in Llama."""

    name = "GraniteForCausalLM"
    classifier = None
    model_type = "granite"
    label = "Granite"
    gguf = GgufKind("granite", pairs=True, factors=True)
    qkv_bias = None
    o_bias = None
    mlp_bias = None
    own_fields = ("attention_scale", *MULTIPLIERS)
    kv_heads_may_lack = True
    bos_token_id = 1
    eos_token_id = 2

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes; each multiplier that config.json lacks is 1, also the multiplier of
        attention scores."""
        factors = {name: get(hf, name, float, 1.0) for name in MULTIPLIERS}
        factors["attention_scale"] = get(hf, "attention_multiplier", float, 1.0)
        return super().read_sizes(hf) | factors

    def write_sizes(self, model: Any) -> dict[str, Any]:
        scale = model.attention_scale
        scale = model.head_dim**-0.5 if scale is None else scale
        factors = {name: getattr(model, name) for name in MULTIPLIERS}
        return super().write_sizes(model) | factors | {"attention_multiplier": scale}
