"""Llama 1 to 3; attention_bias and mlp_bias in config.json decide on biases. CWM is Llama with
windows. Arcee is Llama with an MLP of two matrices and the square of ReLU."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, size
from llmq.arch.rope_family import FULL, WINDOWED, RopeFamily


class Llama(RopeFamily):
    """Llama: RopeFamily, with biases if attention_bias and mlp_bias are true."""

    name = "LlamaForCausalLM"
    model_type = "llama"
    label = "LLaMA"
    gguf = GgufKind("llama", pairs=True, heads=True)
    qkv_bias = None
    o_bias = None
    mlp_bias = None
    kv_heads_may_lack = True
    bos_token_id = 1
    eos_token_id = 2


class Arcee(Llama):
    """Arcee: an MLP without a gate, whose activation is the square of ReLU."""

    name = "ArceeForCausalLM"
    model_type = "arcee"
    label = "Arcee"
    gguf = GgufKind("arcee", pairs=True, heads=True)
    activation = "relu2"
    hidden_acts = ("relu2",)
    norm_eps = 1e-5
    bos_token_id = 128000
    eos_token_id = 128001
    modules = RopeFamily.modules | {"up": ("model.layers.{}.mlp.up_proj",)}
    targets = ("q", "k", "v", "o", "up", "down")


class Cwm(RopeFamily):
    """CWM: attention with a window, but full attention in layers 0, 4, 8 and so on."""

    name = "CwmForCausalLM"
    classifier = None
    model_type = "cwm"
    label = "CWM"
    own_fields = ("windowed_layers",)
    windowed = True
    sliding_window = 8192
    full_every = 4
    head_dim = 128
    norm_eps = 1e-5
    bos_token_id = 128000
    eos_token_id = 128001

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        layers = range(size(hf, "num_hidden_layers"))
        kinds = [WINDOWED if layer % 4 else FULL for layer in layers]
        return super().read_sizes({"rope_theta": 1e6, "layer_types": kinds, **hf})
