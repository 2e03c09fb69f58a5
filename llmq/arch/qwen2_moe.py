"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, and one more that every token meets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmq.arch.common import GgufKind, reject, size
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
        """With the shared expert."""
        reject(hf, "qkv_bias", True)
        found = super().read_sizes(hf)
        shared = size(hf, "shared_expert_intermediate_size")
        return found | {"experts": replace(found["experts"], shared_size=shared)}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """With the shared expert."""
        shared = {"shared_expert_intermediate_size": model.experts.shared_size}
        return super().write_sizes(model) | shared | {"qkv_bias": True}
