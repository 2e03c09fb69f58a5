"""gpt-oss: experts with biases in all layers, attention with sinks, every other layer windowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmq.arch.common import get
from llmq.arch.experts import WithExperts
from llmq.arch.rope_family import FULL, WINDOWED, RopeFamily, all_but_every, layers_by_type
from llmq.arch.rope_scaling import FIRST


class GptOss(WithExperts, RopeFamily):
    """A layer's experts are one parameter in files, whose released ones hold codes of 4 bits."""

    name = "GptOssForCausalLM"
    model_type = "gpt_oss"
    label = "gpt-oss"
    sinks = True
    paired = True
    qkv_bias = None
    o_bias = None
    head_dim = 64
    norm_eps = 1e-5
    sliding_window = 128
    windowed = True
    count_names = ("num_local_experts",)
    own_size = False
    renormalized = True
    targets = tuple(t for t in WithExperts.targets if t not in ("gate", "up", "down"))
    modules = RopeFamily.modules | {"sinks": ("model.layers.{}.self_attn",)}
    expert_modules: Mapping[str, tuple[str, ...]] = {
        "router": ("model.layers.{}.mlp.router",),
    }

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read too which layers have the window, and the activation of experts."""
        defaults = {"attention_bias": True, "rope_theta": 150000.0}
        if not (hf.get("rope_scaling") or hf.get("rope_parameters")):
            defaults["rope_scaling"] = {"rope_type": "yarn", "factor": 32.0, "truncate": False,
                                        FIRST: 4096}  # fmt: skip
        given = {name: value for name, value in hf.items() if name != "layer_types"}
        found = super().read_sizes(defaults | given)
        windowed = layers_by_type(hf)
        if windowed is None:
            windowed = all_but_every(2, found["num_layers"])
        activation = {
            "alpha": get(hf, "swiglu_alpha", float, 1.702),
            "limit": get(hf, "swiglu_limit", float, 7.0),
        }
        its = replace(found["experts"], **activation)
        return found | {"windowed_layers": windowed, "experts": its}

    def fixed(self, model: Any) -> dict[str, Any]:
        """The model says which layers have a window."""
        return {k: v for k, v in super().fixed(model).items() if k != "windowed_layers"}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """With windows and the activation of experts."""
        windowed = model.windowed_layers or (True,) * model.num_layers
        return super().write_sizes(model) | {
            "sliding_window": model.sliding_window or model.max_positions,
            "layer_types": [WINDOWED if window else FULL for window in windowed],
            "swiglu_alpha": model.experts.alpha,
            "swiglu_limit": model.experts.limit,
        }
