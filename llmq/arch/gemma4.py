"""Gemma 4 (text): layers without a window have other heads, and may use their keys as values.

E2B and E4B are variants: the last layers read keys and values of earlier layers, and every layer
adds a vector per token, from a table beside the embedding. P: channels of this vector.

    inputs = norm(C^-1/2 * per_layer_in @ x) + P^1/2 * table[token]       x: the embedding
    stream += norm(2^-1/2 * out @ (gelu(gate @ stream) * inputs of the layer))

26B-A4B is another variant: each layer has experts beside its MLP (`beside_mlp`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmq.arch.common import Architecture, GgufKind, get, reject, size
from llmq.arch.experts import Experts, WithExperts
from llmq.arch.gemma3 import Gemma3
from llmq.arch.halves import matrix, norms
from llmq.arch.matrix import HalfSpec, Module, Part
from llmq.arch.rope_family import FULL, WINDOWED, RopeFamily, norm_modules
from llmq.base.errors import ConfigError

_DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_k_eq_v": False,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
    },
}


class Gemma4(Gemma3):
    """Gemma 4: norms are as in Gemma 3, but their weights are stored unchanged, and values have
    norms, too. Attention scores have no factor. In layers without a window, RoPE rotates only a
    part of the channels."""

    name = "Gemma4ForCausalLM"
    classifier = None
    model_type = "gemma4_text"
    wrapper = "Gemma4ForConditionalGeneration"
    text_defaults: Mapping[str, Any] = {}
    label = "Gemma4"
    gguf = GgufKind(
        "gemma4", heads=True, windows=True, renormalize=True, scale=1.0, softcap=True,
        vocabulary="gemma4",
    )  # fmt: skip
    norm_offset = False
    norm_once = True
    value_norm = True
    layer_scale = True
    own_fields = (
        *(*Gemma3.own_fields, "full_kv_heads", "full_head_dim", "keys_as_values"),
        *("shared_keys", "wide_mlp", "per_layer_size", "experts"),
    )
    sliding_window = 512
    inputs_size = 256
    """Default value of P."""
    rope_kinds = ("proportional",)
    modules = (
        RopeFamily.modules | norm_modules(Gemma3.norm_names) | {"ln1_scale": ("model.layers.{}",)}
    )
    targets = (*Gemma3.targets, "per_layer_gate", "per_layer_projection")

    def of(self, model: Any) -> Architecture:
        """Return the variant with per-layer vectors or the variant with experts, if the model has
        either."""
        if model.experts is not None:
            return WITH_EXPERTS
        return self if model.per_layer_size is None else WITH_INPUTS

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields, and refuse features that are not implemented."""
        given = {**_DEFAULTS, "hidden_size_per_layer_input": self.inputs_size, **hf}
        reject(given, "hidden_activation", "gelu_pytorch_tanh")
        reject(given, "use_bidirectional_attention", None, "vision")  # text has causal attention
        rope = given["rope_parameters"] or _DEFAULTS["rope_parameters"]
        local = get(rope, WINDOWED, dict)
        reject(local, "rope_type", "default")
        own = {"rope_parameters": get(rope, FULL, dict), "hidden_act": self.hidden_acts[0]}
        fields = RopeFamily.read_sizes(self, given | own)
        windowed = (*fields["windowed_layers"][:-1], False)  # the same as in transformers
        shared = get(given, "attention_k_eq_v", bool)
        of_full = _of_full_layers(given, windowed, shared)
        full_head_dim = get(of_full, "head_dim", int, None)
        full_kv_heads = get(of_full, "num_key_value_heads", int, None)
        return fields | {
            "windowed_layers": windowed,
            "local_rope_theta": get(local, "rope_theta", float, 1e4),
            "attention_scale": 1.0,
            "logit_softcap": get(given, "final_logit_softcapping", float, None),
            "full_head_dim": None if full_head_dim == fields["head_dim"] else full_head_dim,
            "full_kv_heads": None if full_kv_heads == fields["num_kv_heads"] else full_kv_heads,
            "keys_as_values": shared,
            "experts": self._read_experts(given),
            **self._read_sharing(given, len(windowed)),
        }

    def _read_experts(self, hf: Mapping[str, Any]) -> Experts | None:
        if not get(hf, "enable_moe_block", bool, False):
            return None
        reject(hf, "hidden_size_per_layer_input", 0, None)  # not implemented together
        return Experts(
            count=size(hf, "num_experts"),
            active=size(hf, "top_k_experts"),
            size=size(hf, "moe_intermediate_size"),
            renormalize=True,
        )

    def _read_sharing(self, hf: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """Read how many last layers share keys, and the width of per-layer vectors."""
        count = get(hf, "num_kv_shared_layers", int, None) or 0
        if not 0 <= count < layers:
            raise ConfigError(
                f"config.json: num_kv_shared_layers: must be from 0 to {layers - 1}, got {count}"
            )
        if not self.inputs_size:
            reject(hf, "hidden_size_per_layer_input", 0, None)
        inputs = get(hf, "hidden_size_per_layer_input", int, None) or None
        if inputs is not None:
            size(hf, "hidden_size_per_layer_input")
            reject(hf, "vocab_size_per_layer_input", hf["vocab_size"])
        shared = tuple(layer >= layers - count for layer in range(layers))
        return {
            "shared_keys": shared if count else None,
            "wide_mlp": count > 0 and get(hf, "use_double_wide_mlp", bool, False),
            "per_layer_size": inputs,
        }

    def fixed(self, model: Any) -> dict[str, Any]:
        """Return fields that a model must have; the last layer has no window."""
        windowed = (model.windowed_layers or (True,) * model.num_layers)[:-1]
        last = {"windowed_layers": (*windowed, False), "attention_scale": 1.0}
        shared = model.shared_keys
        if shared is not None:  # only the last layers share keys
            last["shared_keys"] = tuple(sorted(shared)) if any(shared) else None
        return super().fixed(model) | last

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """Return config.json's fields, with the heads of layers without a window in both
        spellings."""
        fields, last = RopeFamily.write_sizes(self, model), model.heads_of(model.num_layers - 1)
        rope, local = fields.pop("rope_parameters"), {"rope_theta": model.local_rope_theta}
        for name in ("hidden_act", "rope_scaling", "rope_theta"):
            del fields[name]
        heads = {"head_dim": last.channels, "num_key_value_heads": last.kv}
        full = [i for i in range(model.num_layers) if not model.windowed(i)]
        return fields | {
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": model.logit_softcap,
            "rope_parameters": {FULL: rope, WINDOWED: {"rope_type": "default"} | local},
            "per_layer_config": {str(layer): heads for layer in full},
            "global_head_dim": last.channels,
            "num_global_key_value_heads": last.kv,
            "attention_k_eq_v": model.keys_as_values,
            "hidden_size_per_layer_input": model.per_layer_size or 0,
            "vocab_size_per_layer_input": model.vocab_size,
            "num_kv_shared_layers": sum(model.shared_keys or ()),
            "enable_moe_block": model.experts is not None,
            **({} if model.experts is None else _of_experts(model)),
            "use_double_wide_mlp": model.wide_mlp,
        }


class _WithInputs(Gemma4):
    """The variant whose layers add a vector per token, without a norm before this addition."""

    gguf = Gemma4.gguf
    norm_names: Mapping[str, str] = Gemma4.norm_names | {
        "ln3_post": Gemma4.norm_names["ln1_post"],
        "ln1_post": "post_per_layer_input_norm",
    }
    modules = Gemma4.modules | norm_modules(norm_names) | {
        "per_layer_gate": ("model.layers.{}.per_layer_input_gate",),
        "per_layer_out": ("model.layers.{}.per_layer_projection",),
    }  # fmt: skip

    def layers(self, model: Any, layer: int) -> tuple[HalfSpec, ...]:
        return *super().layers(model, layer), _inputs_half(model, layer)

    def beside(self, model: Any) -> dict[str, tuple[Module, ...]]:
        """Return the blocks per_layer_table: (Vp, L*P), and per_layer: per_layer_in (L*P, C),
        per_layer_norm (P,); Vp is the padded vocabulary, L the number of layers."""
        rows, P = model.num_layers * model.per_layer_size, model.per_layer_size
        return {
            "per_layer_table": (
                _whole("per_layer_table", "embed_tokens_per_layer", model.vocab_size,
                       (model.padded_vocab, rows), "embedding"),
            ),
            "per_layer": (
                _whole("per_layer_in", "per_layer_model_projection", rows,
                       (rows, model.hidden_size), "matrix"),
                replace(_whole("per_layer_norm", "per_layer_projection_norm", P, (P,), "norm"),
                        initial="one"),
            ),
        }  # fmt: skip


class _WithExperts(WithExperts, Gemma4):
    """The variant with experts beside the MLP."""

    gguf = Gemma4.gguf
    fused = True
    beside_mlp = True
    experts_at = "model.layers.{}.experts"
    expert_modules: Mapping[str, tuple[str, ...]] = {"router": ("model.layers.{}.router.proj",)}
    modules = Gemma4.modules | norm_modules({
        "ln2_mlp_post": "post_feedforward_layernorm_1",
        "ln2_experts": "pre_feedforward_layernorm_2",
        "ln2_experts_post": "post_feedforward_layernorm_2",
    })  # fmt: skip
    targets = tuple(target for target in WithExperts.targets if target != "fused_experts")

    def write_sizes(self, model: Any) -> dict[str, Any]:
        return Gemma4.write_sizes(self, model)


WITH_INPUTS, WITH_EXPERTS = _WithInputs(), _WithExperts()


def _of_experts(model: Any) -> dict[str, Any]:
    its = model.experts
    sizes = {"num_experts": its.count, "top_k_experts": its.active}
    return sizes | {"moe_intermediate_size": model.expert_size}


def _whole(key: str, name: str, rows: int, shape: tuple[int, ...], kind: str) -> Module:
    part = Part(module=f"model.{name}", rows=rows)
    return Module(key=key, name=f"model.{name}", shape=shape, parts=(part,), kind=kind)


def _inputs_half(config: Any, layer: int) -> HalfSpec:
    """Return the declaration of the computation that adds a layer's vectors. per_layer_gate: (P,
    C). per_layer_out: (C, P)."""
    C, P, at = config.hidden_size, config.per_layer_size, f"model.layers.{layer}"
    gate = matrix(
        config, layer, "per_layer_gate", f"{at}.per_layer_gate", {"per_layer_gate": P}, C,
        input="ln3", gradient="d_per_layer_gate",
    )  # fmt: skip
    out = matrix(
        config, layer, "per_layer_out", f"{at}.per_layer_out", {"per_layer_projection": C}, P,
        input="per_layer_act", gradient="d_per_layer", initial="residual",
    )  # fmt: skip
    return HalfSpec(
        kind="per_layer",
        name="per_layer",
        norm="ln3",
        norms=norms(config, "ln3", layer),
        modules=(gate, out),
        output="per_layer_out",
        activations=("per_layer_gate", "per_layer_act"),
        factor=2**-0.5,
    )


class Gemma4Unified(Gemma4):
    """The dense language model inside Gemma 4 models that embed images and sound in one space."""

    gguf = Gemma4.gguf
    name = "Gemma4UnifiedForCausalLM"
    model_type = "gemma4_unified_text"
    wrapper = "Gemma4UnifiedForConditionalGeneration"
    label = "Gemma4-Unified"
    sliding_window = 1024
    inputs_size = 0


def _of_full_layers(
    hf: Mapping[str, Any], windowed: tuple[bool, ...], shared: bool
) -> Mapping[str, Any]:
    """Return head_dim and num_key_value_heads of the layers without a window."""
    each = get(hf, "per_layer_config", dict, None)
    if each is None:
        kv_heads = get(hf, "num_global_key_value_heads", int, None)
        head_dim = size({"global_head_dim": 512} | dict(hf), "global_head_dim")
        return {"head_dim": head_dim, "num_key_value_heads": kv_heads if shared else None}
    each = {layer.lstrip("0") or "0": fields for layer, fields in each.items()}  # of two digits
    first = each.get(str(len(windowed) - 1), {})
    full = {str(layer): first for layer, has in enumerate(windowed) if not has}
    if {layer: fields for layer, fields in each.items() if fields} != (full if first else {}):
        raise ConfigError(
            "config.json: per_layer_config: expected the same for all layers of full_attention, "
            f"and nothing for others, got {each!r}"
        )
    return first
