"""The halves of blocks, one file a kind: each trains, evaluates and decodes.

`half.py` says what a half does; which halves a layer has, its architecture says by their kinds.
Imports arch, ops, and what model has below blocks.
"""

from llmq.model.halves.attention import AttentionHalf
from llmq.model.halves.delta import DeltaHalf, MambaHalf
from llmq.model.halves.experts import ExpertsHalf
from llmq.model.halves.half import Half
from llmq.model.halves.latent import LatentHalf
from llmq.model.halves.mlp import MlpHalf
from llmq.model.halves.mlp_and_experts import MlpAndExpertsHalf
from llmq.model.halves.per_layer import PerLayerHalf
from llmq.model.halves.short_conv import ShortConvHalf

HALVES: dict[str, type[Half]] = {
    "attention": AttentionHalf,
    "latent_attention": LatentHalf,
    "delta": DeltaHalf,
    "mamba": MambaHalf,
    "short_conv": ShortConvHalf,
    "mlp": MlpHalf,
    "experts": ExpertsHalf,
    "per_layer": PerLayerHalf,
    "mlp_and_experts": MlpAndExpertsHalf,
}
"""By HalfSpec.kind."""
