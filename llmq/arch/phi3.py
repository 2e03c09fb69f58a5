"""Phi-3: Llama whose files hold queries, keys and values in one matrix, and gate and up in one."""

from __future__ import annotations

from typing import Any

from llmq.arch.common import GgufKind
from llmq.arch.rope_family import RopeFamily


class Phi3(RopeFamily):
    """Without biases or stretched positions; its window is that of all layers."""

    name = "Phi3ForCausalLM"
    model_type = "phi3"
    label = "Phi3"
    gguf = GgufKind("phi3")
    kv_heads_may_lack = True
    norm_eps = 1e-5
    windowed = True
    rope_kinds = ()
    bos_token_id = 1
    eos_token_id = 32000
    pad_token_id = 32000
    modules = RopeFamily.modules | {
        "qkv": ("model.layers.{}.self_attn.qkv_proj",),
        "up": ("model.layers.{}.mlp.gate_up_proj",),
    }
    gate_first = True

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """With the window, and no positions beyond those of the first training."""
        first = {"original_max_position_embeddings": model.max_positions}
        return super().write_sizes(model) | first | {"sliding_window": model.sliding_window}
