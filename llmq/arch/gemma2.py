"""Gemma 2: like Gemma 3, but without norms of queries and keys, with soft caps, and with windows in
every other layer."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import get, reject, size
from llmq.arch.gemma3 import Gemma3
from llmq.arch.rope_family import RopeFamily


class Gemma2(Gemma3):
    """Gemma 2: attention scores have a soft cap, which cuDNN does not compute."""

    name = "Gemma2ForCausalLM"
    classifier = "Gemma2ForSequenceClassification"
    model_type = "gemma2"
    wrapper = None
    label = "Gemma2"
    qk_norm = False
    own_fields = ("windowed_layers", "attention_scale", "attention_softcap", "logit_softcap")
    full_every = 2
    older_windows = None
    rope_kinds = RopeFamily.rope_kinds

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes; soft caps that config.json lacks have transformers' defaults."""
        reject(hf, "hidden_activation", "gelu_pytorch_tanh")
        reject(hf, "use_bidirectional_attention", False, None)
        given = {"tie_word_embeddings": True, "query_pre_attn_scalar": 256} | dict(hf)
        given["hidden_act"] = self.hidden_acts[0]
        fields, scalar = RopeFamily.read_sizes(self, given), size(given, "query_pre_attn_scalar")
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | dict(hf)
        return fields | {
            "attention_scale": None if scalar == fields["head_dim"] else scalar**-0.5,
            "attention_softcap": get(caps, "attn_logit_softcapping", float, None),
            "logit_softcap": get(caps, "final_logit_softcapping", float, None),
        }

    def write_sizes(self, model: Any) -> dict[str, Any]:
        fields, scale = RopeFamily.write_sizes(self, model), model.attention_scale
        del fields["hidden_act"]
        return fields | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": model.head_dim if scale is None else round(scale**-2),
            "attn_logit_softcapping": model.attention_softcap,
            "final_logit_softcapping": model.logit_softcap,
        }
