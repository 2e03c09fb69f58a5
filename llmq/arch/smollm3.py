"""SmolLM3: Llama in which every fourth layer has no RoPE (NoPE)."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import get, reject, size
from llmq.arch.rope_family import RopeFamily, all_but_every
from llmq.base.errors import ConfigError


class SmolLm3(RopeFamily):
    """SmolLM3: no_rope_layers in config.json is 1 for layers with RoPE, despite the field's
    name."""

    name = "SmolLM3ForCausalLM"
    model_type = "smollm3"
    label = "SmolLM3"
    qkv_bias = None
    o_bias = None
    mlp_bias = None
    own_fields = ("rope_layers",)
    bos_token_id = 128000
    eos_token_id = 128001
    pad_token_id = 128004

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        reject(hf, "use_sliding_window", False, None)
        layers = get(hf, "no_rope_layers", list, None)
        every, count = get(hf, "no_rope_layer_interval", int, 4), size(hf, "num_hidden_layers")
        if layers is None:
            layers = all_but_every(every, count)
        if len(layers) != count:
            raise ConfigError(f"config.json: no_rope_layers: expected {count} numbers")
        given = {"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True}
        return super().read_sizes(given | dict(hf)) | {"rope_layers": tuple(map(bool, layers))}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        layers = model.rope_layers or (True,) * model.num_layers
        return super().write_sizes(model) | {"no_rope_layers": [int(each) for each in layers]}
