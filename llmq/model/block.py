"""One transformer block of two halves, attention and MLP, and the norms around them.

    residual[l] -> ln1 -> [ qkv (-> qk_norm) -> rope -> attention -> o ] --+--> residual_att
                                                             residual[l] --+
    residual_att -> ln2 -> [ up -> swiglu|gelu -> down ] --+--> residual[l+1]
                                             residual_att -+

A half (in brackets) turns its input x into a branch of the residual stream: `attention_half.py`,
`mlp_half.py`. Where norms stand, and where branches are added, is in `pre_norm.py`: both additions
happen inside the norm that follows, the second one in the next block's ln1 or in the head's norm,
which is why a block's output stays split into `residual_att` and `branch`.
Activations are (rows, features), rows = B*T.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from llmq.base.tensor import Tensor
from llmq.config.model import ModelConfig
from llmq.model.activations import Layer, Recompute
from llmq.model.attention_half import AttentionAgain, AttentionHalf
from llmq.model.linear import EXACT, FAST, Linear
from llmq.model.mlp_half import MlpHalf
from llmq.model.operands import Operands
from llmq.model.parameters import BlockGrads, BlockWeights
from llmq.model.pre_norm import PreNorm
from llmq.model.residuals import Residuals
from llmq.runtime.device import Device


class Blocks:
    """All blocks of a model: they share code, and the buffers between blocks."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        residuals: Residuals,
        operands: Operands,
        recompute: Recompute,
        B: int,
        T: int,
        *,
        attention_backend: str,
        attention_chunks: int,
    ):
        """Allocates every activation of B sequences of T tokens."""
        shape, dtype, fp8 = (operands.rows, config.hidden_size), operands.dtype, operands.fp8
        kinds = recompute.of_layers(config.num_layers)
        shared = (
            dev.alloc("residual_att", shape, dtype, "Activations")
            if any(kind.block for kind in kinds)
            else None
        )
        self.branch = dev.alloc("branch", shape, dtype, "Activations")
        codes = None if fp8 is None else fp8.value
        self.layers = [
            Layer(dev, config, index, kind, residuals.tensors[index], shared, codes, B, T)
            for index, kind in enumerate(kinds)
        ]
        linear = Linear(dev, EXACT if fp8 is None else FAST[fp8.fast].blocks)
        self.norms = PreNorm(dev, config, operands, self.branch)
        self.attention = AttentionHalf(
            dev, config, operands, linear, B, T, backend=attention_backend, chunks=attention_chunks
        )
        self.mlp = MlpHalf(dev, config, operands, linear)

    def forward(self, index: int, w: BlockWeights) -> None:
        """residual[l] (or, for l > 0, residual_att[l-1] + branch) -> residual_att[l], branch."""
        layer = self.layers[index]
        before = self.layers[index - 1].residual_att if index > 0 else None
        with ExitStack() as temps:
            x = self.norms.forward(temps, layer.ln1, before, w.ln1, w.ln1_bias)
            self.attention.forward(temps, layer, w, x, self.branch)
        with ExitStack() as temps:
            x = self.norms.forward(temps, layer.ln2, layer.residual, w.ln2, w.ln2_bias)
            self.mlp.forward(temps, layer, w, x, self.branch)

    def backward(
        self, index: int, w: BlockWeights, g: BlockGrads, d_residual: Tensor, d_x: Tensor
    ) -> None:
        """d_residual (rows, C): gradient of the block's output in, of its input out.

        d_x (rows, C): scratch for the gradient of a half's input. What was not kept is computed
        again first; scales are those of the forward pass.
        """
        layer = self.layers[index]
        with ExitStack() as temps:
            if layer.recompute.block:  # residual_att is needed first, and needs the attention
                attention = self._attention_again(temps, layer, w)
            self._backward_mlp(layer, w, g, d_residual, d_x)
            if not layer.recompute.block:
                attention = self._attention_again(temps, layer, w)
            self.attention.backward(layer, w, g, attention, d_residual, d_x)
        before = self.layers[index - 1].slot("d_mlp") if index > 0 else None
        self.norms.backward(layer.ln1, before, d_residual, d_x, w.ln1, g.ln1, g.ln1_bias)

    def _attention_again(self, temps: ExitStack, layer: Layer, w: BlockWeights) -> AttentionAgain:
        x_again = partial(self.norms.again, temps, layer.ln1, None, w.ln1, w.ln1_bias)
        return self.attention.again(temps, layer, w, x_again, self.branch)

    def _backward_mlp(
        self, layer: Layer, w: BlockWeights, g: BlockGrads, d_residual: Tensor, d_x: Tensor
    ) -> None:
        before = layer.residual if layer.recompute.block else None
        with ExitStack() as temps:
            x_again = partial(self.norms.again, temps, layer.ln2, before, w.ln2, w.ln2_bias)
            mlp = self.mlp.again(temps, layer, w, x_again)
            self.mlp.backward(layer, w, g, mlp, d_residual, d_x)
        before = layer.slot("d_att")
        self.norms.backward(layer.ln2, before, d_residual, d_x, w.ln2, g.ln2, g.ln2_bias)
