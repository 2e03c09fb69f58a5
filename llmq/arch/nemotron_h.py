"""Nemotron-H and Nemotron 3: each layer is only a state space, only attention, only an MLP, or only
experts."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import Architecture, GgufKind, get, reject, size
from llmq.arch.experts import WithExperts
from llmq.arch.mamba import NO_LIMIT, Mamba, mamba_modules
from llmq.arch.matrix import HalfSpec
from llmq.arch.rope_family import RopeFamily
from llmq.base.errors import ConfigError

_AT = "model.layers.{}.mixer"
_KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
"""Kinds of layers in layers_block_type, with their letters in the older hybrid_override_pattern."""
_NAMES = {
    "hidden_act": "mlp_hidden_act",
    "rms_norm_eps": "layer_norm_epsilon",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
"""Names of config.json fields in other families, each with this family's name."""
_FOREIGN = "rope_theta rope_scaling rope_parameters decoder_sparse_step mlp_only_layers".split()
"""Fields of other families, which are not written."""
_DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 4096, "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5, "norm_topk_prob": True, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "ssm_state_size": 128, "n_groups": 8, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "conv_kernel": 4, "use_conv_bias": True,
}  # fmt: skip
"""Defaults in transformers of fields that config.json may lack."""
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


class NemotronH(WithExperts, RopeFamily):
    """Nemotron-H: attention has no positions, and experts have no gates."""

    name = "NemotronHForCausalLM"
    classifier = None
    model_type = "nemotron_h"
    label = "Nemotron-H"
    activation = "relu2"
    hidden_acts = ("relu2",)
    head_dim = 128
    norm_eps = 1e-5
    norm_once = True
    bos_token_id = 1
    eos_token_id = 2
    pad_token_id = 0
    own_fields = ("mixers", "rope_layers", "mlp_layers")
    sigmoid = True
    grouped = True
    shares = True
    shared_gated = False
    count_names = ("n_routed_experts",)
    aux_loss = 0.0
    norm_names: Mapping[str, str] = {"ln1": "norm", "ln2": "norm"}
    modules = mamba_modules(_AT) | {
        "embed": ("model.embeddings",),
        "ln1": ("model.layers.{}.norm",),
        "ln2": ("model.layers.{}.norm",),
        "qkv": tuple(f"{_AT}.{x}_proj" for x in "qkv"),
        "o": (f"{_AT}.o_proj",),
        "up": (f"{_AT}.up_proj",),
        "down": (f"{_AT}.down_proj",),
        "norm": ("model.norm_f",),
        "lm_head": ("lm_head",),
    }
    gguf = GgufKind("nemotron_h", heads=True)
    file_prefix = "backbone."
    # PEFT adds no adapters to mamba_o, because fused kernels read its weight.
    targets = ("q", "k", "v", "o", "up", "down", "mamba_in", "experts", "fused_experts")
    experts_at = f"{_AT}.experts"
    expert_modules: Mapping[str, tuple[str, ...]] = {
        "router": (f"{_AT}.gate",),
        "router_correction": (f"{_AT}.gate",),
        "experts_up": (f"{_AT}.experts.{{}}.up_proj",),
        "experts_down": (f"{_AT}.experts.{{}}.down_proj",),
        "shared_up": (f"{_AT}.shared_experts.up_proj",),
        "shared_down": (f"{_AT}.shared_experts.down_proj",),
    }

    def of(self, model: Any) -> Architecture:
        """Return the variant with experts if the model has experts."""
        return self if model.experts is None else WITH_EXPERTS

    def layers(self, model: Any, layer: int) -> tuple[HalfSpec, ...]:
        """Return the only half of a layer: attention, a mixer, an MLP or experts."""
        return (super().layers(model, layer)[model.mlp_layers[layer]],)

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        for name in ("mlp_bias", "use_bias", "attention_bias", "mamba_proj_bias"):
            reject(hf, name, False, None)
        reject(hf, "moe_latent_size", None)
        reject(hf, "sliding_window", None)
        reject(hf, "time_step_limit", *NO_LIMIT)
        reject(hf, "n_shared_experts", 1)
        reject(hf, "tie_word_embeddings", False)
        kinds = _kinds(hf)
        given = _DEFAULTS | dict(hf) | {"num_hidden_layers": len(kinds), "layer_types": None}
        given |= {ours: given[theirs] for ours, theirs in _NAMES.items()}
        has_experts, spaces = "moe" in kinds, tuple(kind == "linear_attention" for kind in kinds)
        found = (super() if has_experts else super(WithExperts, self)).read_sizes(given)
        net = Mamba(
            key_heads=size(given, "n_groups"),
            key_dim=size(given, "ssm_state_size"),
            value_heads=size(given, "mamba_num_heads"),
            value_dim=size(given, "mamba_head_dim"),
            taps=size(given, "conv_kernel"),
            conv_bias=get(given, "use_conv_bias", bool),
            layers=spaces,
        )
        return found | {
            "mixers": net if any(spaces) else None,
            "rope_layers": (False,) * len(kinds),
            "mlp_layers": tuple(kind in ("mlp", "moe") for kind in kinds),
        }

    def _read_layers(self, hf: Mapping[str, Any]) -> tuple[bool, ...]:
        return tuple(kind == "moe" for kind in _kinds(hf))

    def fixed(self, model: Any) -> dict[str, Any]:
        kinds = model.mlp_layers or ()
        if not kinds or any(
            model.has_mixer(i) if alone else model.has_experts(i) for i, alone in enumerate(kinds)
        ):
            raise ConfigError(f"model mlp_layers: {self.name} has one half in each layer")
        own = super() if model.experts is not None else super(WithExperts, self)
        return own.fixed(model) | {"rope_layers": (False,) * model.num_layers}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        own = super() if model.experts is not None else super(WithExperts, self)
        fields, its = own.write_sizes(model), model.mixers
        fields = {_NAMES.get(k, k): value for k, value in fields.items() if k not in _FOREIGN}
        kinds = [_kind_of(model, layer) for layer in range(model.num_layers)]
        fields |= {"layers_block_type": kinds, "n_shared_experts": 1, "residual_in_fp32": False}
        fields["hybrid_override_pattern"] = "".join(_KINDS[kind] for kind in kinds)
        if its is None:
            return fields
        return fields | {
            "n_groups": its.key_heads,
            "ssm_state_size": its.key_dim,
            "mamba_num_heads": its.value_heads,
            "mamba_head_dim": its.value_dim,
            "conv_kernel": its.taps,
            "use_conv_bias": its.conv_bias,
        }


class _WithExperts(NemotronH):
    """The variant with experts, which has a different name in GGUF files."""

    gguf = GgufKind("nemotron_h_moe", heads=True, routers=True)


WITH_EXPERTS = _WithExperts()


def _kinds(hf: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, named as in layers_block_type."""
    kinds = hf.get("layers_block_type")
    if kinds is None:
        letters = {letter: kind for kind, letter in _KINDS.items()}
        kinds = [letters.get(letter, letter) for letter in get(hf, "hybrid_override_pattern", str)]
    kinds = [_OLDER.get(kind, kind) for kind in kinds]
    if not kinds or any(kind not in _KINDS for kind in kinds):
        raise ConfigError(
            f"config.json: layers_block_type: expected some of {', '.join(_KINDS)}, got {kinds!r}"
        )
    return kinds


def _kind_of(model: Any, layer: int) -> str:
    if model.mlp_layers[layer]:
        return "moe" if model.has_experts(layer) else "mlp"
    return "linear_attention" if model.has_mixer(layer) else "full_attention"
