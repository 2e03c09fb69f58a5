"""One transformer block of two halves, attention and MLP, and the norms around them.

    residual[l] -> ln1 -> [ qkv (-> qk_norm) -> rope -> attention -> o ] --+--> residual_att
                                                             residual[l] --+
    residual_att -> ln2 -> [ up -> swiglu|geglu|gelu -> down ] --+--> residual[l+1]
                                             residual_att -+

A half (in brackets) turns its input x into a branch of the residual stream: `attention_half.py`,
`mlp_half.py`. Where norms stand (mostly as above), and where branches are added, is in
`block_norms.py`: by the last product of a half, or else with a norm, that of the second half in
front of the next block or in the head: a block's output is split into `residual_att` and a branch.
Activations are (rows, features), rows = B*T.

Backward ends at the first parameter that is trained: `Reach`.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from operator import or_
from typing import NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.tensor import Tensor
from llmq.model.activations import Layer, Stream, recompute_of_layers
from llmq.model.attention_half import AttentionAgain, AttentionHalf
from llmq.model.block_linear import BlockLinear
from llmq.model.block_norms import BlockNorms
from llmq.model.int8_base import Int8BaseLinear
from llmq.model.int8_linear import Int8Linear
from llmq.model.linear import FAST, Linear
from llmq.model.mlp_half import MlpHalf
from llmq.model.operands import Operands
from llmq.model.parameters import BlockGrads, BlockWeights
from llmq.model.residuals import Residuals
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device


class Reach(NamedTuple):
    """Which gradients somebody wants, because there is a trained parameter in front of them.

    att_in, mlp_in: of the halves' inputs. heads: of queries, keys and values. att_out: of what the
    attention half puts out. Each of them wants all that follow in the block.
    """

    att_in: bool
    heads: bool
    att_out: bool
    mlp_in: bool

    @classmethod
    def of(cls, g: BlockGrads, *, block_in: bool) -> Reach:
        """block_in: whether the gradient of the block's input is wanted."""
        between = (
            (g.ln1_post, g.ln1, g.ln1_bias),
            (g.qkv, g.qkv_bias, g.q_norm, g.k_norm, g.qkv_a),
            (g.o, g.o_bias, g.o_a),
            (g.ln2_post, g.ln2, g.ln2_bias),
        )
        trained = (any(target is not None for target in targets) for targets in between)
        _, *wanted = accumulate(trained, or_, initial=block_in)
        return cls(*wanted)


class Blocks:
    """All blocks of a model: they share code, and the buffers between blocks."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        residuals: Residuals,
        operands: Operands,
        options: TrainConfig,
        backend: str,
        starts: Tensor | None,
        scalars: Tensor | None,
    ):
        """Allocates every activation of a micro-step. backend and what follows: as of Model."""
        shape, dtype = operands.shape, operands.dtype
        linear = Linear(dev, FAST[options.fp8_fast_accumulation].blocks)
        if options.matmul_dtype == "int8" and options.base_dtype == "int8":
            linear = Int8BaseLinear(dev, config, scalars, options.seq_len)
        elif options.matmul_dtype == "int8":
            linear = Int8Linear(dev, scalars, options.seq_len)
        self.linear = linear = BlockLinear(dev, config, options, linear, dtype, scalars)
        self.residuals = residuals
        # Which halves add to the stream themselves.
        att_adds, self.mlp_adds = (
            not config.arch.post_norm and linear.adds(key, residuals.final) for key in ("o", "down")
        )
        kinds, between, branch = recompute_of_layers(options, config.num_layers), None, None
        if any(kind.block for kind in kinds):
            between = dev.alloc("residual_att", shape, dtype, "Activations")
        if not (att_adds and self.mlp_adds):
            branch = dev.alloc("branch", shape, dtype, "Activations")
        att_branch, before = None if att_adds else branch, None if self.mlp_adds else branch
        mlp_branch = before
        self.layers: list[Layer] = []
        for index, kind in enumerate(kinds):
            residual, after = residuals.tensors[index], residuals.after(index)
            stream = Stream(residual, after, between, att_branch, mlp_branch, before)
            layer = Layer(dev, config, options, index, kind, stream)
            self.layers.append(layer)
            before = layer.mlp_branch
        self.norms = BlockNorms(dev, config, operands)
        self.attention = AttentionHalf(dev, config, options, operands, linear, backend, starts)
        self.mlp = MlpHalf(dev, config, options, operands, linear)

    def forward(self, index: int, w: BlockWeights, *, keep: bool) -> None:
        """The stream in front of a block to that behind it, or to residual_att and mlp_branch.

        keep: backward follows, and will read the stream in front.
        """
        layer, residuals = self.layers[index], self.residuals
        before = self.layers[index - 1].residual_att if index > 0 else None
        with ExitStack() as temps:
            if keep and not self.mlp_adds:
                residuals.write(index)
            x = self.norms.forward(temps, layer.ln1, before, w)
            if keep:
                residuals.written(index)
            self.attention.forward(temps, layer, w, x)
        with ExitStack() as temps:
            x = self.norms.forward(temps, layer.ln2, layer.residual, w)
            if keep and self.mlp_adds:
                residuals.write(index + 1)
            self.mlp.forward(temps, layer, w, x)

    def backward(
        self,
        index: int,
        w: BlockWeights,
        g: BlockGrads,
        d_residual: Tensor,
        d_x: Tensor,
        *,
        wanted: bool,
    ) -> None:
        """d_residual (rows, C): gradient of the block's output in, of its input out.

        d_x (rows, C): scratch for the gradient of a half's input, or with post_norm that of the
        MLP's output in. wanted: whether that of the block's input is; else both hold anything
        afterwards. What was not kept is computed again first; scales are those of the forward pass.
        """
        layer, d_out = self.layers[index], self.norms.d_out(d_residual, d_x)
        reach = Reach.of(g, block_in=wanted)
        with ExitStack() as temps:
            if layer.recompute.block:  # residual_att is needed first, and needs the attention
                attention = self._attention_again(temps, layer, w, g)
            self._backward_mlp(layer, w, g, d_residual, d_x, wanted=reach.mlp_in)
            if not reach.att_out:
                return
            if not layer.recompute.block:
                attention = self._attention_again(temps, layer, w, g)
            to = d_x if reach.att_in else None
            self.attention.backward(layer, w, g, attention, d_out, to, heads=reach.heads)
        if reach.att_in:
            before = self.layers[index - 1].slot("d_mlp") if index > 0 else None
            self.norms.backward(layer.ln1, before, d_residual, d_x, w, g)

    def _attention_again(
        self, temps: ExitStack, layer: Layer, w: BlockWeights, g: BlockGrads
    ) -> AttentionAgain:
        x_again = partial(self.norms.again, temps, layer.ln1, None, w)
        return self.attention.again(temps, layer, w, g, x_again)

    def _backward_mlp(
        self,
        layer: Layer,
        w: BlockWeights,
        g: BlockGrads,
        d_residual: Tensor,
        d_x: Tensor,
        *,
        wanted: bool,
    ) -> None:
        """wanted: whether the gradient of the half's input is, or one of its norms'."""
        before, d_out = layer.residual if layer.recompute.block else None, self.norms.d_out
        with ExitStack() as temps:
            x_again = partial(self.norms.again, temps, layer.ln2, before, w)
            mlp = self.mlp.again(temps, layer, w, g, x_again)
            to = d_x if wanted else None
            self.mlp.backward(layer, w, g, mlp, d_out(d_residual, d_x), to)
        if wanted:
            before = layer.slot("d_att")
            self.norms.backward(layer.ln2, before, d_residual, d_x, w, g)
