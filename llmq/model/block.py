"""One transformer block of two halves, mostly attention and MLP, and the norms around them.

    residual[l] -> ln1 -> [ qkv (-> qk_norm) -> rope -> attention -> o ] --+--> residual_att
                                                             residual[l] --+
    residual_att -> ln2 -> [ up -> swiglu|geglu|gelu -> down ] --+--> residual[l+1]
                                             residual_att -+

A half (in brackets) turns its input x into a branch of the residual stream: each layer has those
of the kinds that its architecture says, from `halves/`. Where norms stand (mostly as above), and
where branches are added, is in `norms.py`: by the last product of a half, or else with a
norm, that of the second half in front of the next block or in the head: a block's output is split
into the stream between its halves and a branch.
Activations are (rows, features), rows = B*T.

Backward ends at the first parameter that is trained: `WantedGradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from operator import or_
from typing import NamedTuple

from llmq.arch.matrix import HalfSpec
from llmq.base.tensor import Tensor
from llmq.model.activations import (
    CacheOfPass,
    HalfLayer,
    HalfOut,
    LayerContext,
    Recompute,
    recompute_of_layers,
)
from llmq.model.halves import HALVES
from llmq.model.halves.half import Half, ModelContext
from llmq.model.norms import NormTensors, alloc_stats
from llmq.model.parameters import PartGrads, PartWeights
from llmq.model.residuals import Residuals, Stream
from llmq.options.adapters import needed_inputs


class LayerStreams(NamedTuple):
    """The buffers that a layer shares with its neighbours, (rows, C) each; see norms.py. before,
    after: the residual stream in front of the layer and behind it. between: that between its
    halves; None: a tensor of its own. branch, last_branch: what the first and the second half put
    out, of all layers, and branch_before, what the layer in front has put out; None where halves
    add to the stream themselves."""

    before: Tensor
    after: Tensor
    between: Tensor | None
    branch: Tensor | None
    last_branch: Tensor | None
    branch_before: Tensor | None


class Layer:
    """Its stream (rows, C) in front of the first half (`residual`) and of the second (`between`).
    branch: (rows, C), what the second half puts out, unless it adds that to the stream itself.
    multiplied_again: keys of the matrices whose products backward computes again."""

    def __init__(
        self,
        shared: ModelContext,
        index: int,
        recompute: Recompute,
        stream: LayerStreams,
        halves: Sequence[Half],
        cache: CacheOfPass | None,
    ):
        """halves: those that compute this layer's. cache: as of Model."""
        dev, config = shared.dev, shared.config
        self.index, self.recompute, self.residual = index, recompute, stream.before
        rows, C = self.residual.shape
        pre, post = config.arch.pre_norm, config.arch.post_norm
        needed = needed_inputs(config, shared.options.model, index)
        of_layer = (index, recompute, self.residual, needed)
        first, second = self.halves = tuple(
            HalfLayer(dev, shared.operands, spec, *of_layer, cache and cache.of(index, spec))
            for spec in config.halves(index)
        )
        self.between = stream.between or first.alloc(f"residual_{first.spec.name}", rows, C)
        # A norm behind a half needs its output in backward. Without one in front of it, its input
        # is the stream.
        branch, self.branch = stream.branch, stream.last_branch
        if post and not recompute.block:
            branch = first.alloc(f"{first.spec.name}_branch", rows, C)
        if post:
            self.branch = second.alloc(f"{second.spec.name}_branch", rows, C)
        first.out, second.out = HalfOut(branch), HalfOut(self.branch)
        if branch is None:
            first.out = HalfOut(self.between, addend=self.residual)
        if self.branch is None:
            second.out = HalfOut(stream.after, addend=self.between)
        sites = ((self.residual, stream.branch_before), (self.between, branch))
        for half, layer, site in zip(halves, self.halves, sites, strict=True):
            name = layer.spec.norm
            kept = pre and half.keeps_input(recompute) and layer.needs(name)
            x = layer.activation(name, C, kept=kept, may_be_codes=True)
            name = f"{name}.{index}"
            stats = alloc_stats(dev, config, name, rows) if pre else None
            post_stats = alloc_stats(dev, config, f"{name}.post", rows) if post else None
            layer.norm = NormTensors(*site, stats, post_stats, x)
            layer.saved = half.keep(layer)
        again = (half.multiplied_again(recompute) for half in halves)
        self.multiplied_again = frozenset(key for keys in again for key in keys)


class WantedGradients(NamedTuple):
    """The gradients that somebody wants, because there is a trained parameter in front of them.
    first_in, second_in: of the halves' inputs. inside: of what leads to the product that makes the
    first half's output. first_out: of that output. Each of them wants all that follow in the
    block."""

    first_in: bool
    inside: bool
    first_out: bool
    second_in: bool

    @classmethod
    def of(cls, halves: tuple[HalfSpec, ...], g: PartGrads, *, block_in: bool) -> WantedGradients:
        """block_in: whether the gradient of the block's input is wanted."""
        first, second = halves
        inner = [module for module in first.modules if module.key != first.output]
        last = [module for module in first.modules if module.key == first.output]
        between = (first.norms, inner, last, second.norms)
        trained = (any(key in g for m in modules for key in m.keys) for modules in between)
        _, *wanted = accumulate(trained, or_, initial=block_in)
        return cls(*wanted)


class Blocks:
    """All blocks of a model: they share code, and the buffers between blocks."""

    def __init__(
        self,
        shared: ModelContext,
        residuals: Residuals,
        cache: CacheOfPass | None,
        *,
        trains: bool,
    ):
        """Allocates every activation of a micro-step. cache: as of Model. trains: backward passes
        follow."""
        dev, config, options, operands, self.linear, self.norms, *_ = shared
        shape, dtype = operands.shape, operands.dtype
        self.residuals = residuals
        specs = [config.halves(layer) for layer in range(config.num_layers)]
        # These halves add to the stream themselves.
        first_adds, self.last_adds = (
            not config.arch.post_norm
            and all(self._adds(layer, spec) for layer, spec in enumerate(of_position))
            for of_position in zip(*specs, strict=True)
        )
        kinds, again, branch = recompute_of_layers(options.memory, config), None, None
        # It has to survive until the next layer begins, where the whole block is recomputed.
        if any(kind.block for kind in kinds):
            again = dev.alloc(f"residual_{specs[0][0].name}", shape, dtype, "Activations")
        offloads = trains and options.memory.offload_between
        left = [i for i, kind in enumerate(kinds) if offloads and not kind.block]
        self.between = Stream(dev, "residual.between", left, shape, dtype, offload=True)
        if not (first_adds and self.last_adds):
            branch = dev.alloc("branch", shape, dtype, "Activations")
        first_branch, before = None if first_adds else branch, None if self.last_adds else branch
        last_branch = before
        names = dict.fromkeys(spec.kind for halves in specs for spec in halves)
        of_kind = {name: HALVES[name](shared) for name in names}
        self.halves = [tuple(of_kind[spec.kind] for spec in halves) for halves in specs]
        self.layers: list[Layer] = []
        for index, kind in enumerate(kinds):
            residual, after = residuals.tensors[index], residuals.after(index)
            between = again if kind.block else self.between.tensors.get(index)
            stream = LayerStreams(residual, after, between, first_branch, last_branch, before)
            layer = Layer(shared, index, kind, stream, self.halves[index], cache)
            self.layers.append(layer)
            before = layer.branch

    def _adds(self, layer: int, spec: HalfSpec) -> bool:
        out = self.residuals.final
        return spec.output is not None and self.linear.accepts_addend(layer, spec.output, out)

    def forward(self, index: int, w: PartWeights, *, keep: bool) -> None:
        """The stream in front of a block to that behind it, or to that between the halves and the
        second one's branch. keep: backward follows, and will read the stream in front."""
        layer, residuals = self.layers[index], self.residuals
        (first, second), (of_first, of_second) = self.halves[index], layer.halves
        before = self.layers[index - 1].between if index > 0 else None
        with ExitStack() as temps:
            if keep and not self.last_adds:
                residuals.write(index)
            x = self.norms.forward(temps, of_first.norm, before, w)
            if keep:
                residuals.written(index)
                self.between.write(index)
            ctx = LayerContext(temps, of_first, w, keep=keep)
            first.forward(ctx, x)
        with ExitStack() as temps:
            x = self.norms.forward(temps, of_second.norm, layer.residual, w)
            if keep:
                self.between.written(index)
            if keep and self.last_adds:
                residuals.write(index + 1)
            ctx = LayerContext(temps, of_second, w, keep=keep)
            second.forward(ctx, x)

    def backward(
        self,
        index: int,
        w: PartWeights,
        g: PartGrads,
        d_residual: Tensor,
        d_x: Tensor,
        *,
        wanted: bool,
    ) -> None:
        """d_residual (rows, C): gradient of the block's output in, of its input out. d_x (rows, C):
        scratch for the gradient of a half's input, or with post_norm that of the second half's
        output in. wanted: whether that of the block's input is; else both hold anything afterwards.
        Tensors that were not kept are computed again first; scales are those of the forward
        pass."""
        layer, d_out = self.layers[index], self.norms.d_out(d_residual, d_x)
        (first, second), (of_first, of_second) = self.halves[index], layer.halves
        reach = WantedGradients.of((of_first.spec, of_second.spec), g, block_in=wanted)
        again = layer.recompute.block
        with ExitStack() as temps:
            ctx = LayerContext(temps, of_first, w, g)
            if again:  # the stream between is needed first, and needs the half
                inputs = first.recompute(ctx)
            with ExitStack() as inner:
                before = layer.residual if again else None
                ctx_of_second = LayerContext(inner, of_second, w, g, before)
                made = second.recompute(ctx_of_second)
                to = d_x if reach.second_in else None
                second.backward(ctx_of_second, made, d_out, to, inside=True)
            if reach.second_in:
                self.norms.backward(of_second.norm, of_first.out_id, d_residual, d_x, w, g)
            if not reach.first_out:
                return
            if not again:
                inputs = first.recompute(ctx)
            to = d_x if reach.first_in else None
            first.backward(ctx, inputs, d_out, to, inside=reach.inside)
        if reach.first_in:
            before = self.layers[index - 1].halves[1].out_id if index > 0 else None
            self.norms.backward(of_first.norm, before, d_residual, d_x, w, g)
