"""Gated short convolutions, which replace attention in some layers: layers and matrices.

    b, c, x = products of the input        out = conv_o @ (c * convolution(b * x))

The convolution is depthwise and causal, has `taps` weights per channel, and does not cross the
borders of documents. C: hidden size.
"""

from dataclasses import dataclass
from typing import Any

from llmq.arch.halves import matrix, norms
from llmq.arch.matrix import HalfSpec
from llmq.arch.mixers import Mixers, vector


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvs(Mixers):
    """Sizes of a model's short convolutions."""

    def half(self, config: Any, layer: int) -> HalfSpec:
        """Return the declaration of a layer's gated short convolution. conv_in: (3C, C), the rows
        of b, c and x. conv: (C, taps). conv_o: (C, C)."""
        C, at = config.hidden_size, f"model.layers.{layer}.conv"
        conv = vector("conv", f"{at}.conv", (C, self.taps), "normal", kind="conv")
        conv_in = matrix(
            config, layer, "conv_in", f"{at}.in_proj", {"conv_in": 3 * C}, C, input="ln1",
            gradient="d_conv_in",
        )  # fmt: skip
        conv_o = matrix(
            config, layer, "conv_o", f"{at}.out_proj", {"conv_o": C}, C, initial="residual",
            input="conv_gated", gradient="d_conv",
        )  # fmt: skip
        return HalfSpec(
            kind="short_conv",
            name="conv",
            norm="ln1",
            norms=norms(config, "ln1", layer),
            modules=(conv_in, conv, conv_o),
            output="conv_o",
            activations=("conv_in", "conv_gated"),
            carried={"before": (self.taps - 1, C)},
        )
