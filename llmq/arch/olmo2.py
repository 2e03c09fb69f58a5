"""OLMo 2 and 3: norms of the outputs of attention and MLP, and norms over all query channels and
over all key channels of a token.

OLMoE has experts in all layers, and the same norms of queries and keys.
"""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, get, reject
from llmq.arch.experts import WithExperts
from llmq.arch.rope_family import FULL, WINDOWED, RopeFamily, norm_modules


class _Olmo(RopeFamily):
    """The fields that OLMo 2 and OLMoE share."""

    qk_norm = True
    wide_qk_norm = True
    qkv_bias = None
    o_bias = None
    kv_heads_may_lack = True
    norm_eps = 1e-5
    eos_token_id = 50279
    pad_token_id = 1


class Olmo2(_Olmo):
    """OLMo 2: norms only of the outputs of attention and MLP."""

    name = "Olmo2ForCausalLM"
    model_type = "olmo2"
    label = "OLMo2"
    gguf = GgufKind("olmo2")
    norm_names: Mapping[str, str] = {
        "ln1_post": "post_feedforward_layernorm",
        "ln2_post": "post_attention_layernorm",
    }
    modules = RopeFamily.modules | norm_modules(norm_names)


class Olmo3(Olmo2):
    """OLMo 3: three of four layers have a window; RoPE is scaled only in the other layers."""

    name = "Olmo3ForCausalLM"
    model_type = "olmo3"
    label = "OLMo3"
    gguf = None
    own_fields = ("windowed_layers", "local_rope_theta")
    windowed = True
    sliding_window = 4096
    full_every = 4

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes: rope_parameters may be given by kind of layer; rope_scaling applies to
        layers without a window."""
        rope = get(hf, "rope_parameters", dict, None) or {}
        local = get(rope, WINDOWED, dict, None) or {}
        reject(local, "rope_type", "default")
        given = {"rope_theta": 500000.0} | dict(hf)
        if {WINDOWED, FULL} & rope.keys():
            given["rope_parameters"] = rope.get(FULL)
        fields = super().read_sizes(given)
        theta = get(local, "rope_theta", float, given["rope_theta"])
        return fields | {"local_rope_theta": theta}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        fields = super().write_sizes(model)
        local = {"rope_type": "default", "rope_theta": model.local_rope_theta}
        kinds = {FULL: fields["rope_parameters"], WINDOWED: local}
        return fields | {"rope_parameters": kinds, "rope_scaling": None}


class Olmoe(WithExperts, _Olmo):
    """OLMoE: norms of the inputs of attention and experts, unlike OLMo 2."""

    name = "OlmoeForCausalLM"
    classifier = None
    model_type = "olmoe"
    label = "OLMoE"
    gguf = GgufKind("olmoe", grouped=False)
    own_size = False
    aux_loss = 0.01

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes; clipping of queries, keys and values is rejected."""
        reject(hf, "clip_qkv", None)
        return super().read_sizes(hf)
