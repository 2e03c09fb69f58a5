"""Mistral: Llama without biases, with a window in all layers."""

from __future__ import annotations

from typing import Any

from llmq.arch.common import GgufKind
from llmq.arch.rope_family import RopeFamily


class Mistral(RopeFamily):
    """A config without sliding_window means one of 4096."""

    name = "MistralForCausalLM"
    model_type = "mistral"
    label = "Mistral"
    gguf = GgufKind("llama", pairs=True, heads=True)
    windowed = True
    sliding_window = 4096
    bos_token_id = 1
    eos_token_id = 2

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """With the window."""
        return super().write_sizes(model) | {"sliding_window": model.sliding_window}
