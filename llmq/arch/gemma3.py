"""Gemma 3 (text): norms of the inputs and outputs of attention and MLP, GeGLU, scaled embeddings,
windowed layers."""

import math
from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, get, reject, size
from llmq.arch.rope_family import FULL, WINDOWED, RopeFamily, all_but_every, norm_modules
from llmq.base.errors import ConfigError


class Gemma3(RopeFamily):
    """Gemma 3: RoPE has another base in layers with a window. The norms' weights are stored minus
    1."""

    name = "Gemma3ForCausalLM"
    classifier = "Gemma3TextForSequenceClassification"
    model_type = "gemma3_text"
    wrapper = "Gemma3ForConditionalGeneration"
    text_defaults: Mapping[str, Any] = {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    }
    label = "Gemma3"
    gguf = GgufKind("gemma3", windows=True, heads=True)
    activation = "geglu"
    norm_offset = True
    qk_norm = True
    qkv_bias = None
    o_bias = None
    head_dim = 256
    own_fields = ("windowed_layers", "local_rope_theta", "attention_scale", "logit_softcap")
    windowed = True
    sliding_window = 4096
    full_every = 6
    older_windows = "sliding_window_pattern"
    rope_kinds = ("linear",)
    bos_token_id = 2
    eos_token_id = 1
    pad_token_id = 0
    norm_names: Mapping[str, str] = {
        "ln1": "input_layernorm",
        "ln2_post": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ln1_post": "post_feedforward_layernorm",
    }
    modules = RopeFamily.modules | norm_modules(norm_names)

    def embedding_scale(self, hidden_size: int) -> float:
        return math.sqrt(hidden_size)

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes; names, defaults, and RoPE parameters by kind of layer differ from
        RopeFamily."""
        reject(hf, "hidden_activation", "gelu_pytorch_tanh")
        reject(hf, "attn_logit_softcapping", None)
        reject(hf, "use_bidirectional_attention", False, None)
        rope = get(hf, "rope_parameters", dict, None) or {}
        if rope.keys() - {WINDOWED, FULL}:
            raise ConfigError(
                f"config.json: rope_parameters: expected {WINDOWED} and {FULL}, got {rope!r}"
            )
        local = get(rope, WINDOWED, dict, None) or {}
        reject(local, "rope_type", "default")
        defaults = {"rope_theta": 1e6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256}
        own = ("hidden_act", "rope_parameters")
        shared = {name: value for name, value in hf.items() if name not in own}
        given = defaults | shared | {"rope_parameters": rope.get(FULL)}
        fields, scalar = super().read_sizes(given), size(given, "query_pre_attn_scalar")
        theta = get(hf, "rope_local_base_freq", float, 1e4)
        return fields | {
            "local_rope_theta": get(local, "rope_theta", float, theta),
            "attention_scale": None if scalar == fields["head_dim"] else scalar**-0.5,
            "logit_softcap": get(hf, "final_logit_softcapping", float, None),
        }

    def write_sizes(self, model: Any) -> dict[str, Any]:
        fields = super().write_sizes(model)
        del fields["hidden_act"]
        windowed, local = model.windowed_layers, model.local_rope_theta
        scale = model.attention_scale
        every = (*windowed, False).index(False) + 1
        if windowed == all_but_every(every, model.num_layers):
            fields[self.older_windows] = every
        return fields | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": model.head_dim if scale is None else round(scale**-2),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": model.logit_softcap,
            "rope_local_base_freq": local,
            "rope_parameters": {
                FULL: fields["rope_parameters"],
                WINDOWED: {"rope_type": "default", "rope_theta": local},
            },
        }
