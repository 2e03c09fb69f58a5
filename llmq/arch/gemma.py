"""Gemma: Llama with GeGLU, scaled embeddings, and norms whose stored weights are smaller by 1."""

import math
from collections.abc import Mapping
from typing import Any

from llmq.arch.common import reject
from llmq.arch.rope_family import RopeFamily


class Gemma(RopeFamily):
    """Gemma: GeGLU with the tanh approximation of GELU."""

    name = "GemmaForCausalLM"
    model_type = "gemma"
    label = "Gemma"
    activation = "geglu"
    hidden_acts = ("gelu_pytorch_tanh",)
    norm_offset = True
    head_dim = 256
    qkv_bias = None
    o_bias = None
    bos_token_id = 2
    eos_token_id = 1
    pad_token_id = 0

    def embedding_scale(self, hidden_size: int) -> float:
        return math.sqrt(hidden_size)

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes: in older files hidden_activation names the activation, and hidden_act is
        ignored."""
        reject(hf, "hidden_activation", *self.hidden_acts, None)
        named = hf.get("hidden_activation") or hf.get("hidden_act", self.hidden_acts[0])
        return super().read_sizes({"tie_word_embeddings": True, **hf, "hidden_act": named})

    def write_sizes(self, model: Any) -> dict[str, Any]:
        return super().write_sizes(model) | {"hidden_activation": self.hidden_acts[0]}
