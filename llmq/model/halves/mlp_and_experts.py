"""An MLP and experts side by side in a transformer block, each followed by a norm: Gemma 4's
26B-A4B.

    x -> MLP -> norm --------------------+--> out
    stream -> norm -> experts -> norm ---+

x is the stream after the norm before the MLP. All norms of the stream share the same statistics.
"""

from contextlib import ExitStack
from copy import copy
from typing import Any, NamedTuple

from llmq.arch.matrix import HalfSpec
from llmq.base.operand import Operand, OutBuffers
from llmq.base.tensor import Tensor
from llmq.model.activations import (
    HalfLayer,
    HalfOut,
    LayerContext,
    NormTensors,
    Recompute,
    Stats,
    scratch_like,
)
from llmq.model.halves.experts import ExpertsHalf
from llmq.model.halves.half import ModelContext
from llmq.model.halves.mlp import MlpHalf
from llmq.model.norms import Normalization, alloc_stats
from llmq.ops.pointwise import norm


class _Part(NamedTuple):
    """The MLP or the experts of one layer. post: key of the output norm's weight. stats: statistics
    of the output norm."""

    layer: HalfLayer
    stats: Stats
    post: str


class MlpAndExpertsHalf:
    """The MLPs and experts of all layers."""

    def __init__(self, shared: ModelContext):
        self.dev, self.config, self.operands = shared.dev, shared.config, shared.operands
        self.norms, self.norm = shared.norms, Normalization(shared.dev, shared.config)
        self.halves = MlpHalf(shared), ExpertsHalf(shared)
        self._again: dict[str, Tensor] = {}

    def keeps_input(self, recompute: Recompute) -> bool:
        return all(half.keeps_input(recompute) for half in self.halves)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        keys = [key for half in self.halves for key in half.multiplied_again(recompute)]
        return (*keys, "down", "experts_down") if recompute.block else tuple(keys)

    def keep(self, layer: HalfLayer) -> tuple[_Part, _Part]:
        mlp, experts = (self._part(layer, spec) for spec in layer.spec.parts)
        inside, kept = experts.layer, self.keeps_input(layer.recompute)
        kept = kept and inside.needs(inside.spec.norm)
        width = layer.norm.stream.shape[1]
        x = inside.activation(inside.spec.norm, width, kept=kept, may_be_codes=True)
        inside.norm = NormTensors(layer.norm.stream, None, layer.norm.stats, None, x)
        for half, part in zip(self.halves, (mlp, experts), strict=True):
            part.layer.saved = half.keep(part.layer)
        return mlp, experts

    def _part(self, layer: HalfLayer, spec: HalfSpec) -> _Part:
        part, name = copy(layer), spec.name
        part.spec, part.made_again = spec, layer.recompute.block
        branch = self._again.get(name) if part.made_again else None
        if branch is None:
            branch = layer.alloc(f"{name}_branch", *layer.norm.stream.shape)
        if part.made_again:  # recomputed layers share the branch's memory
            self._again[name] = branch
        part.out = HalfOut(branch)
        post = "ln2_mlp_post" if name == "mlp" else "ln2_experts_post"
        stats = alloc_stats(self.dev, self.config, f"{post}.{layer.index}", layer.rows)
        return _Part(part, stats, post)

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        parts, out, residual = ctx.layer.saved, ctx.layer.out.out, None
        for half, part in zip(self.halves, parts, strict=True):
            inner = ctx._replace(layer=part.layer)
            if part.layer.norm is not ctx.layer.norm:
                x = self.norms.forward(ctx.temps, part.layer.norm, None, ctx.w)
            half.forward(inner, x)
            branch, weight = part.layer.out.out, ctx.w[part.post]
            norm.post(self.dev, out, part.stats.rstd, branch, residual, weight, self.norm.eps)
            residual = out

    def recompute(self, ctx: LayerContext) -> list[Any]:
        """Return the tensors that backward of the MLP and of the experts needs. The MLP comes
        first, because its norm recomputes the stream if the whole block is recomputed."""
        mlp, experts = ctx.layer.saved
        of_mlp = self.halves[0].recompute(ctx._replace(layer=mlp.layer))
        inner = ctx._replace(layer=experts.layer, before=None)
        return [of_mlp, self.halves[1].recompute(inner)]

    def backward(
        self, ctx: LayerContext, inputs: list, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """Compute the gradients of the experts, then of the MLP, which overwrites d_x, perhaps the
        memory of d_out."""
        (mlp, experts), stream, d_stream = ctx.layer.saved, ctx.layer.norm.stream, ctx.d_stream
        key = experts.layer.spec.norm
        with ExitStack() as temps:
            wanted, d_in = d_x is not None or key in ctx.g, None
            if wanted:
                d_in = scratch_like(self.dev, temps, "d_experts_in", stream)
            self._backward_part(ctx, 1, experts, inputs[1], d_out, d_in)
            if wanted:
                to, of = OutBuffers("", d_stream), (stream, ctx.w[key], experts.layer.norm.stats)
                self.norm.backward(to, ctx.g.get(key), None, d_in, *of, d_stream)
        self._backward_part(ctx, 0, mlp, inputs[0], d_out, d_x)

    def _backward_part(
        self,
        ctx: LayerContext,
        number: int,
        part: _Part,
        inputs: Any,
        d_out: Tensor,
        d_x: Tensor | None,
    ) -> None:
        """Compute d_x (rows, C), the gradient of the part's input, from d_out (rows, C), the
        gradient after the part's output norm."""
        with ExitStack() as temps:
            d_branch = scratch_like(self.dev, temps, f"d_{part.layer.spec.name}_branch", d_out)
            to = self.operands.measured(part.layer.out_id, d_branch)
            of = (part.layer.out.out, ctx.w[part.post], part.stats, None)
            self.norm.backward(to, ctx.g.get(part.post), None, d_out, *of)
            inner = ctx._replace(layer=part.layer)
            self.halves[number].backward(inner, inputs, d_branch, d_x, inside=True)
