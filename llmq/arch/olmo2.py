"""OLMo 2: norms of what each half of a block puts out, and of all queries and all keys at once.

OLMoE has experts in all layers, and the same norms of queries and keys.
"""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, reject
from llmq.arch.experts import WithExperts
from llmq.arch.rope_family import RopeFamily


class _Olmo(RopeFamily):
    """The fields that both have alike."""

    qk_norm = True
    wide_qk_norm = True
    qkv_bias = None
    o_bias = None
    kv_heads_may_lack = True
    norm_eps = 1e-5
    eos_token_id = 50279
    pad_token_id = 1


class Olmo2(_Olmo):
    """Norms stand behind the halves of blocks alone."""

    name = "Olmo2ForCausalLM"
    model_type = "olmo2"
    label = "OLMo2"
    gguf = GgufKind("olmo2")
    norm_names: Mapping[str, str] = {
        "ln1_post": "post_feedforward_layernorm",
        "ln2_post": "post_attention_layernorm",
    }
    modules = RopeFamily.modules | {
        key: (f"model.layers.{{}}.{module}",) for key, module in norm_names.items()
    }


class Olmoe(WithExperts, _Olmo):
    """Norms stand before the halves of blocks, unlike OLMo 2's."""

    name = "OlmoeForCausalLM"
    classifier = None
    model_type = "olmoe"
    label = "OLMoE"
    gguf = GgufKind("olmoe", grouped=False)
    own_size = False
    aux_loss = 0.01

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Queries, keys and values are not clipped."""
        reject(hf, "clip_qkv", None)
        return super().read_sizes(hf)
