"""Hugging Face's config.json on one side, the fields of llmq.config.model.ModelConfig on the other.

Both generations are read: transformers 4 (rope_theta, rope_scaling, torch_dtype) and transformers 5
(rope_parameters, dtype). A field that asks for what is not implemented is an error, never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.base.errors import ConfigError

_REQUIRED = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the Hugging Face class of this name fixes, and its defaults for missing fields."""

    model_type: str
    norm: str = "rmsnorm"
    activation: str = "swiglu"
    positions: str = "rope"
    qk_norm: bool = False
    qkv_bias: bool | None = False
    """None: the config's attention_bias decides, for the output projection too."""
    mlp_bias: bool | None = False
    """None: the config's mlp_bias decides."""
    head_dim: int | None = None
    """Default head_dim; None: hidden_size / num_attention_heads."""
    sliding_window: int | None = None
    """Window that a config without the field means."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None


ARCHITECTURES: dict[str, Architecture] = {
    "Qwen2ForCausalLM": Architecture(model_type="qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(model_type="qwen3", qk_norm=True, qkv_bias=None, head_dim=128),
    "LlamaForCausalLM": Architecture(
        model_type="llama", qkv_bias=None, mlp_bias=None, bos_token_id=1, eos_token_id=2
    ),
    "MistralForCausalLM": Architecture(
        model_type="mistral", sliding_window=4096, bos_token_id=1, eos_token_id=2
    ),
    "GPT2LMHeadModel": Architecture(
        model_type="gpt2",
        norm="layernorm",
        activation="gelu",
        positions="learned",
        qkv_bias=True,
        mlp_bias=True,
        bos_token_id=50256,
        eos_token_id=50256,
    ),
}
"""Every supported architecture by the name that config.json gives in "architectures"."""


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


def read_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ModelConfig for a parsed config.json.

    Raises ConfigError naming the first field that is missing or malformed, or that asks for a
    computation which is not implemented. Dropout is ignored: see ignored_fields.
    """
    names = hf.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(f"config.json: architectures must hold one name, got {names!r}")
    arch = architecture(names[0])
    _reject(hf, "quantization_config", None)
    _reject(hf, "model_type", arch.model_type)
    read = _read_gpt2 if arch.model_type == "gpt2" else _read_rope_family
    eos = hf.get("eos_token_id", arch.eos_token_id)
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) for token in eos_ids):
        raise ConfigError(f"config.json: eos_token_id must be one id or a list of ids, got {eos!r}")
    bos = _get(hf, "bos_token_id", int, None)
    return {
        "architecture": names[0],
        "vocab_size": _size(hf, "vocab_size"),
        "norm": arch.norm,
        "activation": arch.activation,
        "positions": arch.positions,
        "qk_norm": arch.qk_norm,
        "bos_token_id": bos if "bos_token_id" in hf else arch.bos_token_id,
        "eos_token_id": eos_ids[0] if eos_ids else None,
        "other_eos_token_ids": tuple(eos_ids[1:]),
        "pad_token_id": _get(hf, "pad_token_id", int, None),
        "initializer_range": _get(hf, "initializer_range", float, 0.02),
        **read(hf, arch),
    }


def write_fields(model: Any, dtype: str) -> dict[str, Any]:
    """config.json of a ModelConfig whose weights are stored as dtype ('bf16' or 'fp32').

    transformers 4 and 5 both load it as the same model: positions and dtype are written in both
    spellings.
    """
    arch = architecture(model.architecture)
    eos = model.eos_token_ids
    hf_dtype = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    write = _write_gpt2 if arch.model_type == "gpt2" else _write_rope_family
    return {
        "architectures": [model.architecture],
        "model_type": arch.model_type,
        "vocab_size": model.vocab_size,
        **write(model, arch),
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.initializer_range,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(eos) if len(eos) > 1 else model.eos_token_id,
        "pad_token_id": model.pad_token_id,
        "use_cache": True,
        "torch_dtype": hf_dtype,
        "dtype": hf_dtype,
    }


def ignored_fields(hf: Mapping[str, Any]) -> list[str]:
    """One line for every field of config.json that is known to be left out of training: dropout."""
    names = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
    return [
        f"config.json: {name} {hf[name]} is ignored, there is no dropout"
        for name in names
        if hf.get(name)
    ]


def architecture(name: Any) -> Architecture:
    """The row of ARCHITECTURES; ConfigError for a name that is not there."""
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: architectures: {name!r} is not supported, only "
            + ", ".join(ARCHITECTURES)
        )
    return ARCHITECTURES[name]


def _get(hf: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """hf[name], of the type `kind`; null is allowed where the default is None."""
    value = hf.get(name, default)
    if value is _REQUIRED:
        raise ConfigError(f"config.json: {name} is missing")
    if value is None and default is None:
        return None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"config.json: {name}: expected {kind.__name__}, got {value!r}")
    return value


def _size(hf: Mapping[str, Any], name: str) -> int:
    """hf[name], a positive int."""
    value = _get(hf, name, int)
    if value <= 0:
        raise ConfigError(f"config.json: {name}: must be positive, got {value}")
    return value


def _reject(hf: Mapping[str, Any], name: str, *supported: Any) -> None:
    """Raise unless the field is absent or has one of the supported values."""
    if name in hf and hf[name] not in supported:
        wanted = " or ".join(repr(value) for value in supported)
        raise ConfigError(f"config.json: {name}: {hf[name]!r} is not supported, only {wanted}")


def _read_rope_family(hf: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
    _reject(hf, "hidden_act", "silu", "swish")
    # Qwen2's layers from max_window_layers on have the window.
    if (_get(hf, "max_window_layers", int, None) or 0) < _size(hf, "num_hidden_layers"):
        _reject(hf, "use_sliding_window", False, None)
    _reject(hf, "use_mrope", False, None)
    heads = _size(hf, "num_attention_heads")
    hidden = _size(hf, "hidden_size")
    max_positions = _size(hf, "max_position_embeddings")
    window = (
        _get(hf, "sliding_window", int, None) if "sliding_window" in hf else arch.sliding_window
    )
    if arch.model_type == "mistral" and window is not None and window < max_positions:
        raise ConfigError(
            f"config.json: sliding_window {window} is shorter than max_position_embeddings "
            f"{max_positions} and only full attention is implemented; to train on sequences of at "
            f"most {window} tokens, set max_position_embeddings to {window}"
        )
    if any(kind != "full_attention" for kind in _get(hf, "layer_types", list, None) or ()):
        raise ConfigError("config.json: layer_types: only 'full_attention' is supported")
    head_dim = _get(hf, "head_dim", int, arch.head_dim)
    if head_dim is None and hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size {hidden} is no multiple of the {heads} heads; give head_dim"
        )
    kv_default = None if arch.model_type == "llama" else _REQUIRED  # Llama: as many as heads
    kv_heads = _get(hf, "num_key_value_heads", int, kv_default) or heads
    attention_bias = _get(hf, "attention_bias", bool, None) or False
    theta, scaling = _read_rope(hf)
    return {
        "hidden_size": hidden,
        "intermediate_size": _size(hf, "intermediate_size"),
        "num_layers": _size(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "max_positions": max_positions,
        "norm_eps": _get(hf, "rms_norm_eps", float, 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qkv_bias": attention_bias if arch.qkv_bias is None else arch.qkv_bias,
        "o_bias": attention_bias if arch.qkv_bias is None else False,
        "mlp_bias": _get(hf, "mlp_bias", bool, False) if arch.mlp_bias is None else arch.mlp_bias,
        "tied_embeddings": _get(hf, "tie_word_embeddings", bool, False),
    }


def _read_rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: rope_theta and rope_scaling (transformers 4), or rope_parameters (5).

    Where both are given rope_scaling wins, as it does in transformers 5.
    """
    outer = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = {f"{outer}.{name}": value for name, value in (_get(hf, outer, dict, None) or {}).items()}
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ConfigError(f"config.json: {nested[0]}: parameters per layer type are not supported")
    _reject(hf, "partial_rotary_factor", 1, None)
    _reject(rope, f"{outer}.partial_rotary_factor", 1, None)
    theta = _get(hf, "rope_theta", float, 10000.0)
    theta = _get(rope, f"{outer}.rope_theta", float, theta)

    kind = rope.get(f"{outer}.rope_type", rope.get(f"{outer}.type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=_get(rope, f"{outer}.factor", float))
    if kind == "llama3":
        return theta, RopeScaling(
            kind=kind,
            factor=_get(rope, f"{outer}.factor", float),
            low_freq_factor=_get(rope, f"{outer}.low_freq_factor", float),
            high_freq_factor=_get(rope, f"{outer}.high_freq_factor", float),
            original_max_positions=_size(rope, f"{outer}.original_max_position_embeddings"),
        )
    raise ConfigError(
        f"config.json: {outer}.rope_type: {kind!r} is not supported, only default, linear, llama3"
    )


def _write_rope_family(model: Any, arch: Architecture) -> dict[str, Any]:
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
        "rope_theta": model.rope_theta,
        "rope_scaling": rope,
        "rope_parameters": {"rope_type": "default", **(rope or {}), "rope_theta": model.rope_theta},
    }
    if arch.qkv_bias is None:
        fields["attention_bias"] = model.qkv_bias
    if arch.mlp_bias is None:
        fields["mlp_bias"] = model.mlp_bias
    if arch.model_type in ("qwen2", "qwen3"):
        fields |= {"use_sliding_window": False, "max_window_layers": model.num_layers}
    if arch.model_type != "llama":
        fields["sliding_window"] = None
    return fields


def _read_gpt2(hf: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
    _reject(hf, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    _reject(hf, "scale_attn_weights", True)
    _reject(hf, "scale_attn_by_inverse_layer_idx", False)
    _reject(hf, "add_cross_attention", False)
    hidden, heads = _size(hf, "n_embd"), _size(hf, "n_head")
    if hidden % heads:
        raise ConfigError(f"config.json: n_embd {hidden} is no multiple of n_head {heads}")
    return {
        "hidden_size": hidden,
        "intermediate_size": _get(hf, "n_inner", int, None) or 4 * hidden,
        "num_layers": _size(hf, "n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "max_positions": _size(hf, "n_positions"),
        "norm_eps": _get(hf, "layer_norm_epsilon", float, 1e-5),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "tied_embeddings": _get(hf, "tie_word_embeddings", bool, True),
    }


def _write_gpt2(model: Any, arch: Architecture) -> dict[str, Any]:
    return {
        "n_embd": model.hidden_size,
        "n_inner": model.intermediate_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_positions": model.max_positions,
        "n_ctx": model.max_positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
