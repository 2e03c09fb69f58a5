"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, and one more that every token meets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, reject
from llmq.arch.experts import WithExperts
from llmq.arch.qwen2 import Qwen2


class Qwen2Moe(WithExperts, Qwen2):
    """The shared expert's output is multiplied by a gate of its own."""

    name = "Qwen2MoeForCausalLM"
    model_type = "qwen2_moe"
    label = "Qwen2-MoE"
    gguf = GgufKind("qwen2moe")
    shares = True

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Biases are Qwen2's."""
        reject(hf, "qkv_bias", True)
        return super().read_sizes(hf)

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """Say so."""
        return super().write_sizes(model) | {"qkv_bias": True}
