"""GLM-4: RoPE rotates half of each head's channels, stored in pairs; gate and up are one matrix.

GLM-4 of 2024 (`glm`) has norms of the inputs of attention and MLP; GLM-4 of 2025 (`glm4`) also has
norms of the outputs.
"""

from collections.abc import Mapping
from typing import Any

from llmq.arch.rope_family import RopeFamily, norm_modules


class Glm(RopeFamily):
    """GLM-4 of 2024: partial_rotary_factor defaults to 0.5, and attention_bias to true."""

    name = "GlmForCausalLM"
    model_type = "glm"
    label = "GLM"
    rope_pairs = True
    partial_rotary = True
    qkv_bias = None
    gate_first = True
    head_dim = 128
    norm_eps = 1.5625e-7
    eos_token_id = 151329
    pad_token_id = 151329
    modules = RopeFamily.modules | {"up": ("model.layers.{}.mlp.gate_up_proj",)}

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        rope = hf.get("rope_parameters") or {}
        part = hf.get("partial_rotary_factor") or rope.get("partial_rotary_factor", 0.5)
        given = {"attention_bias": True, "num_key_value_heads": 2, **hf}
        return super().read_sizes(given | {"partial_rotary_factor": part})


class Glm4(Glm):
    """GLM-4 of 2025: norms of the inputs and outputs of attention and MLP."""

    name = "Glm4ForCausalLM"
    model_type = "glm4"
    label = "GLM-4"
    norm_names: Mapping[str, str] = {
        "ln1": "input_layernorm",
        "ln2_post": "post_self_attn_layernorm",
        "ln2": "post_attention_layernorm",
        "ln1_post": "post_mlp_layernorm",
    }
    modules = Glm.modules | norm_modules(norm_names)
