"""Qwen2 and Qwen2.5: biases only on queries, keys and values; a window in some layers.

Qwen2-MoE and Qwen1.5-MoE are Qwen2 with experts and a shared expert, which computes every token.
"""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import GgufKind, get, reject, size
from llmq.arch.experts import WithExperts
from llmq.arch.rope_family import FULL, WINDOWED, RopeFamily
from llmq.base.errors import ConfigError


class Qwen2(RopeFamily):
    """Qwen2: if use_sliding_window is true, layers from max_window_layers on have the window,
    unless layer_types lists the layers."""

    name = "Qwen2ForCausalLM"
    model_type = "qwen2"
    label = "Qwen2"
    gguf = GgufKind("qwen2")
    qkv_bias = True
    own_fields = ("windowed_layers",)
    own_tokenizer_class = "Qwen2Tokenizer"
    sliding_window = 4096
    max_window_layers = 28
    """Default of max_window_layers in config.json."""

    def read_windows(self, hf: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Return the window, and the layers with the window."""
        used, num_layers = get(hf, "use_sliding_window", bool, None), size(hf, "num_hidden_layers")
        window = get(hf, "sliding_window", int, None)
        window = window if "sliding_window" in hf else self.sliding_window
        first = get(hf, "max_window_layers", int, None)
        first = self.max_window_layers if first is None else first
        layers = self.layers_by_type(hf)
        if layers is None:
            used_here = bool(used) and window is not None
            layers = tuple(used_here and self.has_window(i, first) for i in range(num_layers))
        if not any(layers):
            return {}
        if not used or window is None or window <= 0:
            raise ConfigError(
                "config.json: sliding_window: must be positive, and use_sliding_window true, "
                f"where layers have one, got {window}"
            )
        if window >= longest:
            return {}
        return {"sliding_window": window, "windowed_layers": None if all(layers) else layers}

    def has_window(self, layer: int, max_window_layers: int) -> bool:
        """Return True if the layer has the window in a config.json without layer_types."""
        return layer >= max_window_layers

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """Return config.json's fields; the layers with a window are written as transformers 4 reads
        them (first layer), and as layer_types."""
        windowed = [model.window_of(layer) is not None for layer in range(model.num_layers)]
        windows = {
            "use_sliding_window": any(windowed),
            "max_window_layers": [*windowed, True].index(True),
            "sliding_window": model.sliding_window,
        }
        if any(windowed):
            windows["layer_types"] = [WINDOWED if window else FULL for window in windowed]
        return super().write_sizes(model) | windows


class Qwen2Moe(WithExperts, Qwen2):
    """Qwen2-MoE: the shared expert's output is multiplied by a gate."""

    name = "Qwen2MoeForCausalLM"
    model_type = "qwen2_moe"
    label = "Qwen2-MoE"
    gguf = GgufKind("qwen2moe")
    shares = True

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        reject(hf, "qkv_bias", True)
        return super().read_sizes(hf)

    def has_window(self, layer: int, max_window_layers: int) -> bool:
        """Return True for every other layer below max_window_layers, because transformers 5 changed
        the rule of Qwen2."""
        return layer % 2 == 0 and layer < max_window_layers

    def write_sizes(self, model: Any) -> dict[str, Any]:
        return super().write_sizes(model) | {"qkv_bias": True}
