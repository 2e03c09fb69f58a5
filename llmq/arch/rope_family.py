"""Llama and its relatives, which differ in biases, windows and a norm: sizes, RoPE, names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.arch.common import Architecture, get, reject, size
from llmq.base.errors import ConfigError

WINDOWED, FULL = "sliding_attention", "full_attention"
"""config.json's layer_types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length of the first training."""

    kind: str
    """'llama3' (by wavelength; uses the last three fields) or 'linear' (positions / factor)."""
    factor: float
    """Stretch factor, at least 1."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_positions / low_freq_factor are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_positions / high_freq_factor are left alone."""
    original_max_positions: int = 8192
    """llama3: sequence length before stretching, in tokens."""


class RopeFamily(Architecture):
    """Llama and its relatives: RMSNorm, rotary positions, SwiGLU, the same names everywhere."""

    kv_heads_may_lack = False
    """A config without num_key_value_heads means as many as there are query heads."""
    norm_eps = 1e-6
    """It holds if the config does not say."""
    windowed = False
    """sliding_window of the config is that of all layers."""
    sliding_window: int | None = None
    """It holds if the config does not say."""
    rope_kinds: tuple[str, ...] = ("linear", "llama3")
    """How positions may be stretched."""
    modules: Mapping[str, tuple[str, ...]] = {
        "embed": ("model.embed_tokens",),
        "ln1": ("model.layers.{}.input_layernorm",),
        "qkv": tuple(f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"),
        "q_norm": ("model.layers.{}.self_attn.q_norm",),
        "k_norm": ("model.layers.{}.self_attn.k_norm",),
        "o": ("model.layers.{}.self_attn.o_proj",),
        "ln2": ("model.layers.{}.post_attention_layernorm",),
        "up": ("model.layers.{}.mlp.up_proj", "model.layers.{}.mlp.gate_proj"),
        "down": ("model.layers.{}.mlp.down_proj",),
        "norm": ("model.norm",),
        "lm_head": ("lm_head",),
    }

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes, rotary positions and biases."""
        reject(hf, "hidden_act", "silu", "swish")
        reject(hf, "use_mrope", False, None)
        heads, hidden = size(hf, "num_attention_heads"), size(hf, "hidden_size")
        max_positions = size(hf, "max_position_embeddings")
        head_dim = get(hf, "head_dim", int, self.head_dim)
        if head_dim is not None and head_dim <= 0:
            raise ConfigError(f"config.json: head_dim: must be positive, got {head_dim}")
        if head_dim is None and hidden % heads:
            raise ConfigError(
                f"config.json: hidden_size {hidden} is no multiple of the {heads} heads; "
                "give head_dim"
            )
        lacks = self.kv_heads_may_lack and hf.get("num_key_value_heads") is None
        kv_heads = heads if lacks else size(hf, "num_key_value_heads")
        attention_bias = get(hf, "attention_bias", bool, None) or False
        theta, scaling = read_rope(hf, self.rope_kinds)
        return {
            "hidden_size": hidden,
            "intermediate_size": size(hf, "intermediate_size"),
            "num_layers": size(hf, "num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim or hidden // heads,
            "max_positions": max_positions,
            **self.read_windows(hf),
            "norm_eps": get(hf, "rms_norm_eps", float, self.norm_eps),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "tied_embeddings": get(hf, "tie_word_embeddings", bool, False),
            **self.kinds(
                attention_bias, self.mlp_bias is None and get(hf, "mlp_bias", bool, False)
            ),
        }

    def read_windows(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The window of attention, and which layers have it: all or none.

        One that is as long as the positions is none.
        """
        if any(kind != FULL for kind in get(hf, "layer_types", list, None) or ()):
            raise ConfigError(f"config.json: layer_types: only {FULL!r} is supported")
        if not self.windowed:
            reject(hf, "use_sliding_window", False, None)
            return {}
        window = get(hf, "sliding_window", int, None)
        window = window if "sliding_window" in hf else self.sliding_window
        if window is not None and window <= 0:
            raise ConfigError(f"config.json: sliding_window: must be positive, got {window}")
        shorter = window is not None and window < size(hf, "max_position_embeddings")
        return {"sliding_window": window if shorter else None}

    def fixed(self, model: Any) -> dict[str, Any]:
        """Positions may be stretched only as transformers does for this architecture."""
        stretched = model.rope_scaling is not None
        if stretched and model.rope_scaling.kind not in self.rope_kinds:
            return super().fixed(model) | {"rope_scaling": None}
        return super().fixed(model)

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """Sizes, rotary positions and biases."""
        scaling = model.rope_scaling
        rope: dict[str, Any] | None = None
        if scaling is not None:
            rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling is not None and scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        theta = model.rope_theta
        fields = {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "max_position_embeddings": model.max_positions,
            "rms_norm_eps": model.norm_eps,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rope_theta": theta,
            "rope_scaling": rope,
            "rope_parameters": {"rope_type": "default", **(rope or {}), "rope_theta": theta},
        }
        if self.qkv_bias is None:
            fields["attention_bias"] = model.qkv_bias
        if self.mlp_bias is None:
            fields["mlp_bias"] = model.mlp_bias
        return fields


def layers_by_type(hf: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """Whether each layer has a window, as layer_types says; None where it is not given."""
    kinds, num_layers = get(hf, "layer_types", list, None), size(hf, "num_hidden_layers")
    if kinds is None:
        return None
    if len(kinds) != num_layers or any(kind not in (WINDOWED, FULL) for kind in kinds):
        raise ConfigError(
            f"config.json: layer_types: expected {num_layers} of {WINDOWED!r} and {FULL!r}, "
            f"got {kinds!r}"
        )
    return tuple(kind == WINDOWED for kind in kinds)


def read_rope(hf: Mapping[str, Any], kinds: tuple[str, ...]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: rope_theta and rope_scaling (transformers 4), or rope_parameters (5).

    If both are given, rope_scaling wins, as it does in transformers 5.
    """
    outer = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = {f"{outer}.{name}": value for name, value in (get(hf, outer, dict, None) or {}).items()}
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ConfigError(f"config.json: {nested[0]}: parameters per layer type are not supported")
    reject(hf, "partial_rotary_factor", 1, None)
    reject(rope, f"{outer}.partial_rotary_factor", 1, None)
    theta = get(hf, "rope_theta", float, 10000.0)
    theta = get(rope, f"{outer}.rope_theta", float, theta)

    kind = rope.get(f"{outer}.rope_type", rope.get(f"{outer}.type", "default"))
    if kind == "default":
        return theta, None
    if kind not in kinds:
        known = ", ".join(("default", *kinds))
        raise ConfigError(
            f"config.json: {outer}.rope_type: {kind!r} is not supported, only {known}"
        )
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=get(rope, f"{outer}.factor", float))
    return theta, RopeScaling(
        kind=kind,
        factor=get(rope, f"{outer}.factor", float),
        low_freq_factor=get(rope, f"{outer}.low_freq_factor", float),
        high_freq_factor=get(rope, f"{outer}.high_freq_factor", float),
        original_max_positions=size(rope, f"{outer}.original_max_position_embeddings"),
    )
