"""GLM-4.5 to 4.7: experts chosen by sigmoids, with a shared expert, in all but the first layers."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, get, size
from llmq.arch.experts import WithExperts
from llmq.arch.mtp import BEHIND
from llmq.arch.rope_family import RopeFamily
from llmq.base.errors import ConfigError


class Glm4Moe(WithExperts, RopeFamily):
    """GLM-4.5: use_qk_norm in config.json says whether queries and keys have norms."""

    name = "Glm4MoeForCausalLM"
    classifier = None
    model_type = "glm4_moe"
    label = "GLM-4-MoE"
    gguf = GgufKind("glm4moe", heads=True, routers=True, nextn=True)
    partial_rotary = True
    mtp = BEHIND
    qkv_bias = None
    norm_eps = 1e-5
    sigmoid = True
    shares = True
    shared_gated = False
    dense_first = True
    grouped = True
    aux_loss = 0.0
    count_names = ("n_routed_experts",)
    expert_modules = WithExperts.expert_modules | {
        "shared_up": tuple(
            f"model.layers.{{}}.mlp.shared_experts.{x}_proj" for x in ("up", "gate")
        ),
        "shared_down": ("model.layers.{}.mlp.shared_experts.down_proj",),
    }

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        rope = hf.get("rope_parameters") or {}
        part = hf.get("partial_rotary_factor") or rope.get("partial_rotary_factor", 0.5)
        shared = size({"n_shared_experts": 1, **hf}, "n_shared_experts")
        width = size(hf, "moe_intermediate_size") * shared
        given = {"norm_topk_prob": True, **hf, "shared_expert_intermediate_size": width}
        fields = super().read_sizes(given | {"partial_rotary_factor": part})
        return fields | {"qk_norm": get(hf, "use_qk_norm", bool, False)}

    def _read_layers(self, hf: Mapping[str, Any]) -> tuple[bool, ...]:
        dense = get(hf, "first_k_dense_replace", int, 1)
        return tuple(layer >= dense for layer in range(size(hf, "num_hidden_layers")))

    def fixed(self, model: Any) -> dict[str, Any]:
        fixed = super().fixed(model) | {"qk_norm": model.qk_norm}
        layers, its = model.experts.layers or (), model.experts
        if list(layers) != sorted(layers) or its.shared_size % model.expert_size:
            raise ConfigError(
                f"model experts: {self.name} needs layers without experts to be the first ones, "
                "and a shared expert as wide as some of the others"
            )
        return fixed

    def write_sizes(self, model: Any) -> dict[str, Any]:
        fields, its = super().write_sizes(model), model.experts
        for name in ("decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size"):
            del fields[name]
        return fields | {
            "first_k_dense_replace": (its.layers or (True,)).count(False),
            "n_shared_experts": its.shared_size // model.expert_size,
            "use_qk_norm": model.qk_norm,
        }
