"""Phi-3: Llama whose files hold queries, keys and values in one matrix, and gate and up in
another."""

from typing import Any

from llmq.arch.common import GgufKind
from llmq.arch.rope_family import RopeFamily
from llmq.arch.rope_scaling import FIRST


class Phi3(RopeFamily):
    """Phi-3: no biases, and the window in all layers."""

    name = "Phi3ForCausalLM"
    model_type = "phi3"
    label = "Phi3"
    gguf = GgufKind("phi3", longrope=True)
    kv_heads_may_lack = True
    norm_eps = 1e-5
    windowed = True
    rope_kinds = ("longrope",)
    partial_rotary = True
    bos_token_id = 1
    eos_token_id = 32000
    pad_token_id = 32000
    modules = RopeFamily.modules | {
        "qkv": ("model.layers.{}.self_attn.qkv_proj",),
        "up": ("model.layers.{}.mlp.gate_up_proj",),
    }
    gate_first = True

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """Return config.json's fields, with the window, and with the sequence length before RoPE
        scaling."""
        scaling = model.rope_scaling
        first = {FIRST: (scaling and scaling.original_max_positions) or model.max_positions}
        return super().write_sizes(model) | first | {"sliding_window": model.sliding_window}
