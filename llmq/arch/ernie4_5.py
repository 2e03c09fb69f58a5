"""ERNIE 4.5 (dense): Llama whose files store the two channels of a RoPE pair next to each other."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import get
from llmq.arch.rope_family import RopeFamily


class Ernie45(RopeFamily):
    """ERNIE 4.5: use_bias in config.json decides on the biases of attention and MLP."""

    name = "Ernie4_5ForCausalLM"
    classifier = None
    model_type = "ernie4_5"
    label = "ERNIE4.5"
    rope_pairs = True
    qkv_bias = None
    o_bias = None
    mlp_bias = None
    head_dim = 128
    norm_eps = 1e-5
    kv_heads_may_lack = True
    bos_token_id = 1
    eos_token_id = 2
    pad_token_id = 0

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        bias = get(hf, "use_bias", bool, None) or False
        own = {"rope_theta": 500000.0, "tie_word_embeddings": True}
        return super().read_sizes(own | dict(hf) | {"attention_bias": bias, "mlp_bias": bias})

    def write_sizes(self, model: Any) -> dict[str, Any]:
        return super().write_sizes(model) | {"use_bias": model.mlp_bias}


class Helium(RopeFamily):
    """Helium: the same architecture as ERNIE 4.5, without biases."""

    name = "HeliumForCausalLM"
    model_type = "helium"
    label = "Helium"
    rope_pairs = True
    head_dim = 128
    norm_eps = 1e-8
    bos_token_id = 1
    eos_token_id = 2
    pad_token_id = 3
