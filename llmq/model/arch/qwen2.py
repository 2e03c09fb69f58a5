"""Qwen2 and Qwen2.5: biases on queries, keys and values alone."""

from __future__ import annotations

from typing import Any

from llmq.model.arch.rope_family import RopeFamily


class Qwen2(RopeFamily):
    """Windows of attention are refused unless they are those of no layer."""

    name = "Qwen2ForCausalLM"
    model_type = "qwen2"
    label = "Qwen2"
    qkv_bias = True
    own_tokenizer_class = True

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """With fields that say that no layer has a window."""
        windows = {"use_sliding_window": False, "max_window_layers": model.num_layers}
        return super().write_sizes(model) | windows | {"sliding_window": None}
