"""MiniMax-M2: experts chosen by sigmoids in all layers; one norm of all query channels of a token,
and one of all key channels."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, reject, size
from llmq.arch.experts import WithExperts
from llmq.arch.rope_family import RopeFamily

_AT = "model.layers.{}.block_sparse_moe"


class MiniMaxM2(WithExperts, RopeFamily):
    """MiniMax-M2: the weights of a token's active experts always have the sum 1."""

    name = "MiniMaxM2ForCausalLM"
    classifier = None
    model_type = "minimax_m2"
    label = "MiniMax-M2"
    gguf = GgufKind("minimax-m2", heads=True, renormalize=True)
    qk_norm = True
    wide_qk_norm = True
    partial_rotary = True
    head_dim = 128
    bos_token_id = 200034
    eos_token_id = 200020
    sigmoid = True
    renormalized = True
    own_size = False
    count_names = ("num_local_experts",)
    expert_modules: Mapping[str, tuple[str, ...]] = {
        "router": (f"{_AT}.gate",),
        "router_correction": (_AT,),
        "experts_up": (f"{_AT}.experts.{{}}.w3", f"{_AT}.experts.{{}}.w1"),
        "experts_down": (f"{_AT}.experts.{{}}.w2",),
    }

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes; released files give the number of rotated channels instead of
        partial_rotary_factor."""
        reject(hf, "scoring_func", "sigmoid")
        reject(hf, "use_routing_bias", True)
        reject(hf, "shared_intermediate_size", 0, None)
        reject(hf, "router_jitter_noise", 0, None)
        given = {"rope_theta": 5e6, "head_dim": self.head_dim, **hf}
        if "rotary_dim" in hf:
            given["partial_rotary_factor"] = size(hf, "rotary_dim") / size(given, "head_dim")
        return super().read_sizes(given)
