"""StarCoder2: a transformer with RoPE, shared keys, LayerNorm, GELU, and biases in all layers."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import get
from llmq.arch.rope_family import RopeFamily


class Starcoder2(RopeFamily):
    """StarCoder2: use_bias in config.json decides on the biases of all projections."""

    name = "Starcoder2ForCausalLM"
    model_type = "starcoder2"
    label = "StarCoder2"
    norm = "layernorm"
    activation = "gelu"
    hidden_acts = ("gelu_pytorch_tanh",)
    qkv_bias = None
    o_bias = None
    mlp_bias = None
    windowed = True
    bos_token_id = 50256
    eos_token_id = 50256
    modules = RopeFamily.modules | {
        "up": ("model.layers.{}.mlp.c_fc",),
        "down": ("model.layers.{}.mlp.c_proj",),
    }
    targets = ("q", "k", "v", "o", "up", "down")

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        bias = get(hf, "use_bias", bool, True)
        own = {"attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": True}
        own["rms_norm_eps"] = get(hf, "norm_epsilon", float, 1e-5)
        return super().read_sizes({**own, **hf})

    def write_sizes(self, model: Any) -> dict[str, Any]:
        fields = super().write_sizes(model)
        fields["norm_epsilon"] = fields.pop("rms_norm_eps")
        own = {"use_bias": model.mlp_bias, "sliding_window": model.sliding_window}
        return fields | own
