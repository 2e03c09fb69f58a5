"""Gemma 4 (text, dense): other heads in layers without a window, whose keys may be their values."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import get, reject, size
from llmq.arch.gemma3 import Gemma3
from llmq.arch.rope_family import FULL, WINDOWED, RopeFamily, norm_modules
from llmq.base.errors import ConfigError

_DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_k_eq_v": False,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
    },
}


class Gemma4(Gemma3):
    """Norms as Gemma 3's, whose weights are stored as they are, and of values. Scores have no
    factor. Layers without a window turn a part of the frequencies alone."""

    name = "Gemma4ForCausalLM"
    classifier = None
    model_type = "gemma4_text"
    wrapper = "Gemma4ForConditionalGeneration"
    text_defaults: Mapping[str, Any] = {}
    label = "Gemma4"
    gguf = None
    norm_offset = False
    norm_once = True
    value_norm = True
    layer_scale = True
    own_fields = (*Gemma3.own_fields, "full_kv_heads", "full_head_dim", "keys_as_values")
    sliding_window = 512
    per_layer_size = 256
    """Width of embeddings that each layer has of its own, where the config does not say."""
    rope_kinds = ("proportional",)
    modules = (
        RopeFamily.modules | norm_modules(Gemma3.norm_names) | {"ln1_scale": ("model.layers.{}",)}
    )

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields, and refuse parts that are not implemented."""
        given = {**_DEFAULTS, "hidden_size_per_layer_input": self.per_layer_size, **hf}
        reject(given, "hidden_activation", "gelu_pytorch_tanh")
        reject(given, "hidden_size_per_layer_input", 0, None)
        reject(given, "num_kv_shared_layers", 0, None)
        reject(given, "enable_moe_block", False, None)
        reject(given, "use_bidirectional_attention", None, "vision")  # text is causal
        rope = given["rope_parameters"] or _DEFAULTS["rope_parameters"]
        local = get(rope, WINDOWED, dict)
        reject(local, "rope_type", "default")
        own = {"rope_parameters": get(rope, FULL, dict), "hidden_act": self.hidden_acts[0]}
        fields = RopeFamily.read_sizes(self, given | own)
        windowed = (*fields["windowed_layers"][:-1], False)  # as transformers has it
        shared = get(given, "attention_k_eq_v", bool)
        of_full = _of_full_layers(given, windowed, shared)
        return fields | {
            "windowed_layers": windowed,
            "local_rope_theta": get(local, "rope_theta", float, 1e4),
            "attention_scale": 1.0,
            "logit_softcap": get(given, "final_logit_softcapping", float, None),
            "full_head_dim": get(of_full, "head_dim", int, None),
            "full_kv_heads": get(of_full, "num_key_value_heads", int, None),
            "keys_as_values": shared,
        }

    def fixed(self, model: Any) -> dict[str, Any]:
        """The last layer has no window."""
        windowed = (model.windowed_layers or (True,) * model.num_layers)[:-1]
        last = {"windowed_layers": (*windowed, False), "attention_scale": 1.0}
        return super().fixed(model) | last

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """Heads of layers without a window in both spellings."""
        fields, last = RopeFamily.write_sizes(self, model), model.heads_of(model.num_layers - 1)
        rope, local = fields.pop("rope_parameters"), {"rope_theta": model.local_rope_theta}
        for name in ("hidden_act", "rope_scaling", "rope_theta"):
            del fields[name]
        heads = {"head_dim": last.channels, "num_key_value_heads": last.kv}
        full = [i for i in range(model.num_layers) if not model.windowed(i)]
        return fields | {
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": model.logit_softcap,
            "rope_parameters": {FULL: rope, WINDOWED: {"rope_type": "default"} | local},
            "per_layer_config": {str(layer): heads for layer in full},
            "global_head_dim": last.channels,
            "num_global_key_value_heads": last.kv,
            "attention_k_eq_v": model.keys_as_values,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
        }


class Gemma4Unified(Gemma4):
    """The dense language model beside images and sound of one embedding."""

    name = "Gemma4UnifiedForCausalLM"
    model_type = "gemma4_unified_text"
    wrapper = "Gemma4UnifiedForConditionalGeneration"
    label = "Gemma4-Unified"
    sliding_window = 1024
    per_layer_size = 0


def _of_full_layers(
    hf: Mapping[str, Any], windowed: tuple[bool, ...], shared: bool
) -> Mapping[str, Any]:
    """Return head_dim and num_key_value_heads of the layers without a window."""
    each = get(hf, "per_layer_config", dict, None)
    if each is None:
        kv_heads = get(hf, "num_global_key_value_heads", int, None)
        head_dim = size({"global_head_dim": 512} | dict(hf), "global_head_dim")
        return {"head_dim": head_dim, "num_key_value_heads": kv_heads if shared else None}
    first = each.get(str(len(windowed) - 1), {})
    full = {str(layer): first for layer, has in enumerate(windowed) if not has}
    if {layer: fields for layer, fields in each.items() if fields} != (full if first else {}):
        raise ConfigError(
            "config.json: per_layer_config: expected the same for all layers of full_attention, "
            f"and nothing for others, got {each!r}"
        )
    return first
