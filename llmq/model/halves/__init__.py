"""The halves of transformer blocks, such as attention and MLP: one file per kind, for training,
evaluation and decoding.

`half.py` defines the interface of a half. An architecture declares which kinds of halves each layer
has. The folder imports arch, ops, and the modules of model below `block.py`.
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
"""The classes of halves, by HalfSpec.kind."""
