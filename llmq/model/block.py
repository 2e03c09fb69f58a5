"""One transformer block: usually attention and an MLP, with the norms before and after each.

    residual[l] -> ln1 -> [ qkv (-> qk_norm) -> rope -> attention -> o ] --+--> residual_att
                                                             residual[l] --+
    residual_att -> ln2 -> [ up -> swiglu|geglu|gelu -> down ] --+--> residual[l+1]
                                             residual_att -+

A half (in brackets) computes a branch of the residual stream from its input x; `halves/` has one
file for each kind of half. `norms.py` says where norms stand, usually as in this diagram. The last
product of a half adds the branch to the stream, or the next norm adds the branch. If the next norm
adds, a block's output is two tensors: the stream before the last half, and the branch. Activations
are (rows, features), rows = B*T.

Backward ends at the first trained parameter, as `WantedGradients` says.
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
    """The buffers that a layer shares with adjacent layers, (rows, C) each; `norms.py` explains
    their use. before, after: the residual stream before and after the layer. between: the stream
    before each half but the first; if None, the layer allocates a tensor. branches: the output of
    each half, in memory that all layers share; None if the half's last product adds to the stream.
    branch_before: output of the last half of the preceding layer; None if that half's last product
    adds to the stream."""

    before: Tensor
    after: Tensor
    between: tuple[Tensor | None, ...]
    branches: tuple[Tensor | None, ...]
    branch_before: Tensor | None


class Layer:
    """One transformer block of a model. streams: the residual stream before each half, (rows, C)
    each. branch: (rows, C), output of the last half; None if the half's last product adds to the
    stream. multiplied_again: keys of the matrices whose products backward recomputes."""

    def __init__(
        self,
        shared: ModelContext,
        index: int,
        recompute: Recompute,
        stream: LayerStreams,
        halves: Sequence[Half],
        cache: CacheOfPass | None,
    ):
        """halves: the objects that compute this layer. cache: keys and values of generated texts,
        as in Model; None in training."""
        dev, config = shared.dev, shared.config
        self.index, self.recompute = index, recompute
        rows, C = stream.before.shape
        post = config.arch.post_norm
        needed = needed_inputs(config, shared.options.model, index)
        of_layer = (index, recompute, stream.before, needed)
        self.halves = tuple(
            HalfLayer(dev, shared.operands, spec, *of_layer, cache and cache.of(index, spec))
            for spec in config.halves(index)
        )
        inner = [
            between or half.alloc(f"residual_{half.spec.name}", rows, C)
            for half, between in zip(self.halves, stream.between, strict=False)
        ]
        self.streams = (stream.before, *inner)
        first, before = self.halves[0], stream.branch_before
        following = (*inner, stream.after)
        for half, implementation, here, branch, after in zip(
            self.halves, halves, self.streams, stream.branches, following, strict=True
        ):
            # Backward of a norm after a half needs the half's output; backward recomputes only the
            # output of the first half. Without a norm before a half, the input of the half is the
            # stream.
            if post and (half is not first or not recompute.block):
                branch = half.alloc(f"{half.spec.name}_branch", rows, C)
            half.out = HalfOut(after, addend=here) if branch is None else HalfOut(branch)
            name, pre = half.spec.norm, half.spec.pre_norm
            kept = pre and implementation.keeps_input(recompute) and half.needs(name)
            x = half.activation(name, C, kept=kept, may_be_codes=True)
            name = f"{name}.{index}"
            stats = alloc_stats(dev, config, name, rows) if pre else None
            post_stats = alloc_stats(dev, config, f"{name}.post", rows) if post else None
            half.norm = NormTensors(here, before, stats, post_stats, x)
            half.saved = implementation.keep(half)
            before = branch
        self.branch = before
        again = (half.multiplied_again(recompute) for half in halves)
        self.multiplied_again = frozenset(key for keys in again for key in keys)


class WantedGradients(NamedTuple):
    """The gradients of a half that backward must compute, because earlier parameters are trained.
    input: the gradient of the half's input. inside: the gradient of the input of the half's last
    product. output: the gradient of the half's output. Each gradient needs the gradients of all
    later tensors of the block."""

    input: bool
    inside: bool
    output: bool

    @classmethod
    def of(
        cls, halves: tuple[HalfSpec, ...], g: PartGrads, *, block_in: bool
    ) -> list[WantedGradients]:
        """Return the wanted gradients of each half. block_in: True if the gradient of the block's
        input is wanted."""
        found, wanted = [], block_in
        for half in halves:
            inner = [module for module in half.modules if module.key != half.output]
            last = [module for module in half.modules if module.key == half.output]
            groups = (half.norms, inner, last)
            trained = (any(key in g for m in modules for key in m.keys) for modules in groups)
            _, *each = accumulate(trained, or_, initial=wanted)
            found.append(cls(*each))
            wanted = each[-1]
        return [*found[:-1], found[-1]._replace(inside=True, output=True)]


class Blocks:
    """All blocks of a model, which share code and the buffers between blocks."""

    def __init__(
        self, shared: ModelContext, residuals: Residuals, cache: CacheOfPass | None, *, trains: bool
    ):
        """Allocate every activation of a micro-step. cache: keys and values of generated texts, as
        in Model. trains: True if backward passes follow."""
        dev, config, options, operands, self.linear, self.norms, *_ = shared
        shape, dtype = operands.shape, operands.dtype
        specs = [config.halves(layer) for layer in range(config.num_layers)]
        # True for each half whose last product adds to the residual stream.
        adds = [
            not config.arch.post_norm
            and all(self._adds(residuals, layer, spec) for layer, spec in enumerate(of_position))
            for of_position in zip(*specs, strict=True)
        ]
        self.last_adds = adds[-1]
        kinds, branch = recompute_of_layers(options.memory, config), None
        blocks = any(kind.block for kind in kinds)
        # The streams between halves of a recomputed block are free when the next layer begins.
        names = [f"residual_{spec.name}" for spec in specs[0][:-1]]
        again = [dev.alloc(name, shape, dtype, "Activations") for name in names if blocks]
        offloads = trains and options.memory.offload_between
        left = [i for i, kind in enumerate(kinds) if offloads and not kind.block]
        between = [
            Stream(dev, f"residual.between{i or ''}", left, shape, dtype, offload=True)
            for i in range(len(adds) - 1)
        ]
        self.streams = (residuals, *between)
        if not all(adds):
            branch = dev.alloc("branch", shape, dtype, "Activations")
        branches = tuple(None if adds_itself else branch for adds_itself in adds)
        names = dict.fromkeys(spec.kind for halves in specs for spec in halves)
        of_kind = {name: HALVES[name](shared) for name in names}
        self.halves = [tuple(of_kind[spec.kind] for spec in halves) for halves in specs]
        self.layers: list[Layer] = []
        before = branches[-1]
        for index, kind in enumerate(kinds):
            inside = again if kind.block else [stream.tensors.get(index) for stream in between]
            around = (residuals.tensors[index], residuals.after(index))
            stream = LayerStreams(*around, tuple(inside), branches, before)
            layer = Layer(shared, index, kind, stream, self.halves[index], cache)
            self.layers.append(layer)
            before = layer.branch

    def _adds(self, residuals: Residuals, layer: int, spec: HalfSpec) -> bool:
        out = residuals.final
        return spec.output is not None and self.linear.accepts_addend(layer, spec.output, out)

    def forward(self, index: int, w: PartWeights, *, keep: bool) -> None:
        """Compute the residual stream after the block. If the next norm adds the last half's
        branch, compute the branch, and the stream before that half. keep: True if backward follows
        and reads the block's input."""
        layer, last = self.layers[index], len(self.streams) - 1
        before = self.layers[index - 1].streams[-1] if index > 0 else None
        for i, (half, of_half) in enumerate(zip(self.halves[index], layer.halves, strict=True)):
            with ExitStack() as temps:
                if keep and i == 0 and not self.last_adds:
                    self.streams[0].write(index)
                x = self.norms.forward(temps, of_half.norm, before, w)
                if keep:
                    self.streams[i].written(index)
                    if i < last:
                        self.streams[i + 1].write(index)
                    elif self.last_adds:
                        self.streams[0].write(index + 1)
                half.forward(LayerContext(temps, of_half, w, keep=keep), x)
            before = layer.streams[i]

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
        """d_residual (rows, C): gradient of the block's output, overwritten with the gradient of
        the block's input. d_x (rows, C): scratch for the gradient of a half's input; with
        post_norm, it first holds the gradient of the last half's output. wanted: False if nobody
        reads d_residual and d_x afterwards. Backward first recomputes the tensors that forward did
        not keep, with forward's scales."""
        layer, d_out = self.layers[index], self.norms.d_out(d_residual, d_x)
        specs = tuple(half.spec for half in layer.halves)
        reach = WantedGradients.of(specs, g, block_in=wanted)
        again = layer.recompute.block
        contexts, made = [], []
        with ExitStack() as outer:
            for i, (half, of_half) in enumerate(zip(self.halves[index], layer.halves, strict=True)):
                before = layer.streams[i - 1] if again and i > 0 else None
                temps = outer.enter_context(ExitStack())
                contexts.append(LayerContext(temps, of_half, w, g, before, d_residual))
                if again:  # the preceding half writes this stream
                    made.append(half.recompute(contexts[i]))
            for i in reversed(range(len(specs))):
                half, of_half, ctx = self.halves[index][i], layer.halves[i], contexts[i]
                if not reach[i].output:
                    return
                inputs = made.pop() if again else half.recompute(ctx)
                to = d_x if reach[i].input else None
                half.backward(ctx, inputs, d_out, to, inside=reach[i].inside)
                ctx.temps.close()
                if reach[i].input:
                    before = self._out_before(index, i)
                    self.norms.backward(of_half.norm, before, d_residual, d_x, w, g)

    def _out_before(self, index: int, half: int) -> str | None:
        """Return the name of the output gradient of the half that precedes this half."""
        if half > 0:
            return self.layers[index].halves[half - 1].out_id
        return self.layers[index - 1].halves[-1].out_id if index > 0 else None
