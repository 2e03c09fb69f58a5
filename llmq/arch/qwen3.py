"""Qwen3: RMSNorm of query and key heads, whose size config.json gives; attention_bias decides on
biases.

Qwen3-MoE has experts in place of the MLP, in all layers or in some.
"""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind
from llmq.arch.experts import WithExperts
from llmq.arch.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Qwen3: config.json has the same fields about windows as Qwen2."""

    name = "Qwen3ForCausalLM"
    model_type = "qwen3"
    label = "Qwen3"
    gguf = GgufKind("qwen3", heads=True)
    qk_norm = True
    qkv_bias = None
    o_bias = None
    head_dim = 128


class Qwen3Moe(WithExperts, Qwen3):
    """Qwen3-MoE: transformers 5 writes the number of experts under Mixtral's name, and reads both
    names. As in transformers, all layers have the window, whatever layer_types and
    max_window_layers say."""

    name = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    label = "Qwen3-MoE"
    gguf = GgufKind("qwen3moe", heads=True, renormalize=True)
    count_names = ("num_experts", "num_local_experts")
    own_fields = ()

    def layers_by_type(self, hf: Mapping[str, Any]) -> None:
        return None

    def has_window(self, layer: int, max_window_layers: int) -> bool:
        return True
