"""EXAONE 4: norms of the outputs of attention and MLP, and of each query and key head. In models
with windows, layers without a window have no RoPE."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import get
from llmq.arch.olmo2 import Olmo2
from llmq.arch.rope_family import RopeFamily


class Exaone4(RopeFamily):
    """EXAONE 4: if config.json gives sliding_window_pattern n, every n-th layer has no window."""

    name = "Exaone4ForCausalLM"
    model_type = "exaone4"
    label = "EXAONE4"
    qk_norm = True
    norm_eps = 1e-5
    windowed = True
    full_every = 4
    own_fields = ("windowed_layers", "rope_layers")
    bos_token_id = 0
    eos_token_id = 2
    norm_names = Olmo2.norm_names
    modules = Olmo2.modules

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes: without sliding_window in config.json, the window is 4096; with null, all
        layers have RoPE and no window."""
        given, window = {"sliding_window": 4096} | dict(hf), hf.get("sliding_window", 4096)
        if hf.get("layer_types") is None:  # sliding_window_pattern may be a word such as LLLG
            every = get(hf, "sliding_window_pattern", int, None) or 4
            kinds = ("sliding_attention", "full_attention")
            layers = range(1, hf["num_hidden_layers"] + 1)
            given["layer_types"] = [kinds[not window or n % every == 0] for n in layers]
        fields = super().read_sizes(given)
        rope = None if window is None else self.layers_by_type(given)
        return fields | {"rope_layers": rope}

    def write_sizes(self, model: Any) -> dict[str, Any]:
        """Return config.json's fields, with layer_types if layers differ in RoPE."""
        fields = super().write_sizes(model)
        if model.rope_layers is None:
            return fields | {"sliding_window": None}
        kinds = ["sliding_attention" if rope else "full_attention" for rope in model.rope_layers]
        return fields | {"layer_types": kinds}
