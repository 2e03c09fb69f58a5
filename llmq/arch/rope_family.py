"""Llama and similar families, which differ in biases, windows and norms: sizes, RoPE, names of
weights."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import Architecture, get, reject, size
from llmq.arch.rope_scaling import FIRST, KINDS, longest_sequence, read_scaling
from llmq.base.errors import ConfigError

WINDOWED, FULL = "sliding_attention", "full_attention"
"""Words in layer_types of config.json."""


class RopeFamily(Architecture):
    """Llama and similar families: RMSNorm, rotary positions, SwiGLU, and Llama's names of
    weights."""

    kv_heads_may_lack = False
    """True if num_key_value_heads is optional; the default is then num_attention_heads."""
    norm_eps = 1e-6
    """Default value of rms_norm_eps."""
    windowed = False
    """True if all layers have the sliding_window of config.json."""
    sliding_window: int | None = None
    """Default value of sliding_window."""
    full_every: int | None = None
    """Without layer_types in config.json, every full_every-th layer has full attention. None if all
    layers are alike."""
    older_windows: str | None = None
    """Name of the field that gives full_every in files older than layer_types."""
    rope_kinds: tuple[str, ...] = tuple(kind for kind in KINDS if kind != "proportional")
    """Kinds of RoPE scaling that transformers implements for this family."""
    partial_rotary = False
    """True if config.json may give partial_rotary_factor, the share of a head's channels that are
    rotated."""
    hidden_acts: tuple[str, ...] = ("silu", "swish")
    """Names of the activation in hidden_act of config.json; the first name is written."""
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
        reject(hf, "hidden_act", *self.hidden_acts)
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
        rope = read_rope(hf, self.rope_kinds, partial=self.partial_rotary)
        return {
            "hidden_size": hidden,
            "intermediate_size": size(hf, "intermediate_size"),
            "num_layers": size(hf, "num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim or hidden // heads,
            "max_positions": max_positions,
            **self.read_windows(hf, longest_sequence(rope["rope_scaling"], max_positions)),
            "norm_eps": get(hf, "rms_norm_eps", float, self.norm_eps),
            **rope,
            "tied_embeddings": get(hf, "tie_word_embeddings", bool, False),
            **self.kinds(
                attention_bias, self.mlp_bias is None and get(hf, "mlp_bias", bool, False)
            ),
        }

    def read_windows(self, hf: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Return the fields for attention's window and for the layers with the window; a window of
        `longest` or more tokens counts as no window.

        longest: length of the longest sequence, in tokens.
        """
        layers = {}
        if self.full_every is not None:
            every = self.full_every
            if self.older_windows is not None and self.older_windows in hf:
                every = size(hf, self.older_windows)
            of_each = self.layers_by_type(hf) or all_but_every(every, size(hf, "num_hidden_layers"))
            layers["windowed_layers"] = of_each
        elif any(kind != FULL for kind in get(hf, "layer_types", list, None) or ()):
            raise ConfigError(f"config.json: layer_types: only {FULL!r} is supported")
        if not self.windowed:
            reject(hf, "use_sliding_window", False, None)
            return {}
        window = get(hf, "sliding_window", int, None)
        window = window if "sliding_window" in hf else self.sliding_window
        if window is not None and window <= 0:
            raise ConfigError(f"config.json: sliding_window: must be positive, got {window}")
        shorter = window is not None and window < longest
        return {"sliding_window": window if shorter else None, **layers}

    def layers_by_type(self, hf: Mapping[str, Any]) -> tuple[bool, ...] | None:
        """Return True for each layer with a window, from layer_types; None without the field."""
        kinds, num_layers = get(hf, "layer_types", list, None), size(hf, "num_hidden_layers")
        if kinds is None:
            return None
        if len(kinds) != num_layers or any(kind not in (WINDOWED, FULL) for kind in kinds):
            raise ConfigError(
                f"config.json: layer_types: expected {num_layers} of {WINDOWED!r} and {FULL!r}, "
                f"got {kinds!r}"
            )
        return tuple(kind == WINDOWED for kind in kinds)

    def fixed(self, model: Any) -> dict[str, Any]:
        """Return fields that a model must have; RoPE scaling must be of a kind that transformers
        implements for this architecture."""
        stretched = model.rope_scaling is not None
        if stretched and model.rope_scaling.kind not in self.rope_kinds:
            return super().fixed(model) | {"rope_scaling": None}
        whole = {} if self.partial_rotary else {"partial_rotary_factor": 1.0}
        return super().fixed(model) | whole

    def write_sizes(self, model: Any) -> dict[str, Any]:
        rope = None if model.rope_scaling is None else model.rope_scaling.write()
        theta, part = model.rope_theta, {}
        if self.partial_rotary:
            part = {"partial_rotary_factor": model.partial_rotary_factor}
        fields = {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "max_position_embeddings": model.max_positions,
            "rms_norm_eps": model.norm_eps,
            "hidden_act": self.hidden_acts[0],
            "attention_dropout": 0.0,
            "rope_theta": theta,
            "rope_scaling": rope,
            "rope_parameters": {"rope_type": "default", **(rope or {}), "rope_theta": theta} | part,
            **part,
        }
        if self.qkv_bias is None:
            fields["attention_bias"] = model.qkv_bias
        if self.mlp_bias is None:
            fields["mlp_bias"] = model.mlp_bias
        if self.full_every is not None:
            windowed = model.windowed_layers or (True,) * model.num_layers
            fields["sliding_window"] = model.sliding_window or model.max_positions
            fields["layer_types"] = [WINDOWED if window else FULL for window in windowed]
        return fields


def norm_modules(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the entries of `Architecture.modules` for the norms in `names`."""
    return {key: (f"model.layers.{{}}.{module}",) for key, module in names.items()}


def all_but_every(every: int, num_layers: int) -> tuple[bool, ...]:
    """Return True for all layers but every `every`-th."""
    return tuple((layer + 1) % every != 0 for layer in range(num_layers))


def read_rope(hf: Mapping[str, Any], kinds: tuple[str, ...], *, partial: bool) -> dict[str, Any]:
    """Return base, scaling and rotated share of RoPE, from rope_theta and rope_scaling
    (transformers 4), or from rope_parameters (transformers 5). If a file has both, rope_scaling
    wins, as in transformers 5. partial: True if some channels may stay unrotated."""
    outer = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    inner = get(hf, outer, dict, None) or {}
    rope = {f"{outer}.{name}": value for name, value in inner.items()}
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ConfigError(f"config.json: {nested[0]}: parameters per layer type are not supported")
    if not partial and inner.get("rope_type") != "proportional":
        reject(hf, "partial_rotary_factor", 1, None)
        reject(rope, f"{outer}.partial_rotary_factor", 1, None)
    part = get(hf, "partial_rotary_factor", float, None)
    if partial:
        part = get(rope, f"{outer}.partial_rotary_factor", float, part)
    theta = get(hf, "rope_theta", float, 10000.0)
    theta = get(rope, f"{outer}.rope_theta", float, theta)
    longest = size(hf, "max_position_embeddings")
    first = size(hf, FIRST) if FIRST in hf else longest
    return {
        "rope_theta": theta,
        "rope_scaling": read_scaling(inner, outer, kinds, longest, first),
        "partial_rotary_factor": 1.0 if part is None else part,
    }
