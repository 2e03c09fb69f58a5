"""LFM2: gated short convolutions in most layers, and attention with norms of queries and keys in
the others."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, get, reject, size
from llmq.arch.rope_family import FULL, RopeFamily, norm_modules
from llmq.arch.short_conv import ShortConvs
from llmq.base.errors import ConfigError

CONV = "conv"
_AT = "model.layers.{}"


class Lfm2(RopeFamily):
    """LFM2: if config.json says so, the MLP's width is two thirds of the given width, rounded."""

    name = "Lfm2ForCausalLM"
    classifier = None
    model_type = "lfm2"
    label = "LFM2"
    gguf = GgufKind("lfm2", heads=True)
    qk_norm = True
    own_fields = ("mixers",)
    norm_eps = 1e-5
    bos_token_id = 1
    eos_token_id = 2
    pad_token_id = 0
    norm_names: Mapping[str, str] = {"ln1": "operator_norm", "ln2": "ffn_norm"}
    modules = RopeFamily.modules | norm_modules(norm_names) | {
        "q_norm": (f"{_AT}.self_attn.q_layernorm",),
        "k_norm": (f"{_AT}.self_attn.k_layernorm",),
        "o": (f"{_AT}.self_attn.out_proj",),
        "up": (f"{_AT}.feed_forward.w3", f"{_AT}.feed_forward.w1"),
        "down": (f"{_AT}.feed_forward.w2",),
        "conv_in": (f"{_AT}.conv.in_proj",),
        "conv_o": (f"{_AT}.conv.out_proj",),
        "norm": ("model.embedding_norm",),
    }  # fmt: skip
    targets = (*RopeFamily.targets, "conv_in", "conv_o")

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        reject(hf, "conv_bias", False, None)
        count = size(hf, "num_hidden_layers")
        own = {
            "rope_theta": 1e6,
            "rms_norm_eps": get(hf, "norm_eps", float, self.norm_eps),
            "tie_word_embeddings": get(hf, "tie_embedding", bool, True),
            "intermediate_size": _width(hf),
            "layer_types": [FULL] * count,
        }
        given = own | {name: value for name, value in hf.items() if name not in own} | {
            name: hf[name] for name in ("rope_theta", "tie_word_embeddings") if name in hf
        }  # fmt: skip
        layers = _convolved(hf, count)
        taps = size({"conv_L_cache": 3, **hf}, "conv_L_cache")
        convs = ShortConvs(taps=taps, layers=layers) if any(layers) else None
        return super().read_sizes(given) | {"mixers": convs}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        fields = super().write_sizes(model)
        fields["norm_eps"] = fields.pop("rms_norm_eps")
        layers = range(model.num_layers)
        return fields | {
            "layer_types": [CONV if model.has_mixer(layer) else FULL for layer in layers],
            "conv_L_cache": 3 if model.mixers is None else model.mixers.taps,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
        }


def _width(hf: Mapping[str, Any]) -> int:
    """Return the MLP's width, computed from config.json as in transformers."""
    width = size(hf, "block_ff_dim" if "block_ff_dim" in hf else "intermediate_size")
    if not get(hf, "block_auto_adjust_ff_dim", bool, True):
        return width
    width, factor = int(2 * width / 3), get(hf, "block_ffn_dim_multiplier", float, 1.0)
    if factor is None:
        return width
    multiple = size({"block_multiple_of": 256, **hf}, "block_multiple_of")
    return -(-int(factor * width) // multiple) * multiple


def _convolved(hf: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Return True for each layer with a convolution; older files list the layers with attention."""
    kinds = get(hf, "layer_types", list, None)
    if kinds is None:
        attend = get(hf, "full_attn_idxs", list, None)
        return tuple(attend is not None and layer not in attend for layer in range(count))
    if len(kinds) != count or any(kind not in (CONV, FULL) for kind in kinds):
        raise ConfigError(
            f"config.json: layer_types: expected {count} of {CONV!r} and {FULL!r}, got {kinds!r}"
        )
    return tuple(kind == CONV for kind in kinds)
