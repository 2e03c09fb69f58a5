"""gpt-oss: experts with biases in all layers, attention with sinks, and windows in every other
layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmq.arch.common import GgufKind, get
from llmq.arch.experts import WithExperts
from llmq.arch.rope_family import RopeFamily
from llmq.arch.rope_scaling import FIRST


class GptOss(WithExperts, RopeFamily):
    """gpt-oss: files store each matrix of all experts of a layer as one parameter; released files
    hold 4-bit codes."""

    name = "GptOssForCausalLM"
    model_type = "gpt_oss"
    label = "gpt-oss"
    gguf = GgufKind(
        "gpt-oss", windows=True, heads=True, renormalize=True, full_every=2,
        needs=("output.weight", "blk.0.attn_output.bias"), activation=(1.702, 7.0),
    )  # fmt: skip
    sinks = True
    paired = True
    qkv_bias = None
    o_bias = None
    head_dim = 64
    norm_eps = 1e-5
    own_fields = ("windowed_layers",)
    windowed = True
    sliding_window = 128
    full_every = 2
    count_names = ("num_local_experts",)
    own_size = False
    renormalized = True
    targets = tuple(t for t in WithExperts.targets if t not in ("gate", "up", "down"))
    modules = RopeFamily.modules | {"sinks": ("model.layers.{}.self_attn",)}
    expert_modules: Mapping[str, tuple[str, ...]] = {"router": ("model.layers.{}.mlp.router",)}

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {"attention_bias": True, "rope_theta": 150000.0}
        if not (hf.get("rope_scaling") or hf.get("rope_parameters")):
            defaults["rope_scaling"] = {"rope_type": "yarn", "factor": 32.0, "truncate": False,
                                        FIRST: 4096}  # fmt: skip
        found = super().read_sizes({**defaults, **hf})
        activation = {
            "alpha": get(hf, "swiglu_alpha", float, 1.702),
            "limit": get(hf, "swiglu_limit", float, 7.0),
        }
        return found | {"experts": replace(found["experts"], **activation)}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        its = {"swiglu_alpha": model.experts.alpha, "swiglu_limit": model.experts.limit}
        return super().write_sizes(model) | its
