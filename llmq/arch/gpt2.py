"""GPT-2: LayerNorm, learned positions, GELU, and biases in all layers; matrices are stored
transposed."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import Architecture, GgufKind, get, reject, size
from llmq.base.errors import ConfigError


class Gpt2(Architecture):
    """GPT-2: config.json has other field names; Conv1D layers store (in_features, out_features)."""

    name = "GPT2LMHeadModel"
    model_type = "gpt2"
    label = "GPT2"
    gguf = GgufKind("gpt2")
    norm = "layernorm"
    activation = "gelu"
    positions = "learned"
    pads_embedding = False
    qkv_bias = True
    o_bias = True
    mlp_bias = True
    mlp_factor = 4
    bos_token_id = 50256
    eos_token_id = 50256
    modules: Mapping[str, tuple[str, ...]] = {
        "embed": ("transformer.wte",),
        "positions": ("transformer.wpe",),
        "ln1": ("transformer.h.{}.ln_1",),
        "qkv": ("transformer.h.{}.attn.c_attn",),
        "o": ("transformer.h.{}.attn.c_proj",),
        "ln2": ("transformer.h.{}.ln_2",),
        "up": ("transformer.h.{}.mlp.c_fc",),
        "down": ("transformer.h.{}.mlp.c_proj",),
        "norm": ("transformer.ln_f",),
        "lm_head": ("lm_head",),
    }
    transposed = True
    classifier = "GPT2ForSequenceClassification"

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        reject(hf, "activation_function", "gelu_new", "gelu_pytorch_tanh")
        reject(hf, "scale_attn_weights", True)
        reject(hf, "scale_attn_by_inverse_layer_idx", False)
        reject(hf, "add_cross_attention", False)
        hidden, heads = size(hf, "n_embd"), size(hf, "n_head")
        if hidden % heads:
            raise ConfigError(f"config.json: n_embd {hidden} is no multiple of n_head {heads}")
        return {
            "hidden_size": hidden,
            "intermediate_size": get(hf, "n_inner", int, None) or self.mlp_factor * hidden,
            "num_layers": size(hf, "n_layer"),
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": hidden // heads,
            "max_positions": size(hf, "n_positions"),
            "norm_eps": get(hf, "layer_norm_epsilon", float, 1e-5),
            "tied_embeddings": get(hf, "tie_word_embeddings", bool, True),
            **self.kinds(),
        }

    def write_sizes(self, model: Any) -> dict[str, Any]:
        return {
            "n_embd": model.hidden_size,
            "n_inner": model.intermediate_size,
            "n_layer": model.num_layers,
            "n_head": model.num_heads,
            "n_positions": model.max_positions,
            "n_ctx": model.max_positions,
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }

    def fixed(self, model: Any) -> dict[str, Any]:
        """Return fields that a model must have, such as head size and number of key heads, which
        config.json lacks."""
        heads = {"num_kv_heads": model.num_heads, "hidden_size": model.num_heads * model.head_dim}
        return super().fixed(model) | heads
