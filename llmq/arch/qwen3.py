"""Qwen3: RMSNorm on query and key heads, whose size is given; biases by attention_bias."""

from __future__ import annotations

from llmq.arch.common import GgufKind
from llmq.arch.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Its config has Qwen2's fields of windows."""

    name = "Qwen3ForCausalLM"
    model_type = "qwen3"
    label = "Qwen3"
    gguf = GgufKind("qwen3", heads=True)
    qk_norm = True
    qkv_bias = None
    o_bias = None
    head_dim = 128
