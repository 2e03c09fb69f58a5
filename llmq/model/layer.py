"""One layer: the residual stream around its two halves, and what it keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.tensor import Tensor
from llmq.formats.format import Format
from llmq.model import norm
from llmq.model.activations import Cache, HalfLayer, HalfOut, NormTensors, Recompute
from llmq.model.halves.half import Half
from llmq.model.norm import Stats
from llmq.options.adapters import needed_inputs
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device


class LayerStreams(NamedTuple):
    """The buffers that a layer shares with its neighbours, (rows, C) each; see block_norms.py.

    before, after: the residual stream in front of the layer and behind it. between: that between
    the halves of all layers whose whole block is recomputed, where it only has to survive until
    the next layer begins. branch, last_branch: what the first and the second half put out, of all
    layers, and branch_before, what the layer in front has put out; None where halves add to the
    stream themselves.
    """

    before: Tensor
    after: Tensor
    between: Tensor | None
    branch: Tensor | None
    last_branch: Tensor | None
    branch_before: Tensor | None


class Layer:
    """Its stream (rows, C) in front of the first half (`residual`) and of the second (`between`).

    branch: (rows, C), what the second half puts out, unless it adds that to the stream itself.
    multiplied_again: keys of the matrices whose products backward computes again.
    """

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        options: TrainConfig,
        format: Format,
        index: int,
        recompute: Recompute,
        stream: LayerStreams,
        halves: Sequence[Half],
        cache: Cache | None,
    ):
        """halves: those that compute this layer's. cache: as of Model."""
        self.index, self.recompute, self.residual = index, recompute, stream.before
        rows, C = self.residual.shape
        needed = needed_inputs(config, options, index)
        pre, post = config.arch.pre_norm, config.arch.post_norm
        of_layer = (index, recompute, self.residual, needed)
        first, second = self.halves = tuple(
            HalfLayer(dev, format, spec, *of_layer, cache and cache.of(index, spec))
            for spec in config.halves(index)
        )
        own = stream.between if recompute.block else None
        self.between = own or first.alloc(f"residual_{first.spec.name}", rows, C)
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
        for half, here, site in zip(halves, self.halves, sites, strict=True):
            name = here.spec.norm
            kept = pre and half.keeps_input(recompute) and here.needs(name)
            x = here.activation(name, C, kept=kept, may_be_codes=True)
            here.norm = NormTensors(*site, *_site_stats(dev, config, f"{name}.{index}", rows), x)
            here.kept = half.keep(here)
        again = (half.multiplied_again(recompute) for half in halves)
        self.multiplied_again = frozenset(key for keys in again for key in keys)


def _site_stats(
    dev: Device, config: ModelConfig, name: str, rows: int
) -> tuple[Stats | None, Stats | None]:
    """Those of NormTensors."""
    pre, post = config.arch.pre_norm, config.arch.post_norm
    stats = norm.alloc_stats(dev, config, name, rows) if pre else None
    return stats, norm.alloc_stats(dev, config, f"{name}.post", rows) if post else None
