"""Qwen3-MoE: Qwen3 with experts in the place of the MLP, in all layers or in some."""

from __future__ import annotations

from llmq.arch.common import GgufKind
from llmq.arch.experts import WithExperts
from llmq.arch.qwen3 import Qwen3


class Qwen3Moe(WithExperts, Qwen3):
    """transformers 5 calls the number of experts as Mixtral does, and reads both names."""

    name = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    label = "Qwen3-MoE"
    gguf = GgufKind("qwen3moe", heads=True, renormalize=True)
    count_names = ("num_experts", "num_local_experts")
