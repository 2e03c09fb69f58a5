"""Activations of a block: kept for backward, computed again, or cached for generation."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import numpy as np

from llmq.arch.matrix import HalfSpec
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import BF16, E4M3, F32, I32, DType
from llmq.base.operand import turned
from llmq.base.tensor import Tensor
from llmq.formats.operands import Activation, Operands, id_of
from llmq.model.parameters import PartGrads, PartParameters, PartWeights
from llmq.ops.attention import paged
from llmq.ops.attention.paged import BLOCK
from llmq.options.groups.memory import MemoryOptions
from llmq.options.option_types import layer_set
from llmq.runtime.device import Device

T = TypeVar("T")


class Recompute(NamedTuple):
    """The tensors that a layer computes again in backward instead of keeping (--recompute-…
    options)."""

    swiglu: bool = False
    norm: bool = False
    ffn: bool = False
    qkv: bool = False
    att: bool = False
    block: bool = False


def recompute_of_layers(memory: MemoryOptions, config: ModelConfig) -> list[Recompute]:
    """The Recompute of each layer. memory: normalized options.

    With recompute_swiglu None, backward computes a gated MLP's activation again, for free: the
    kernel of the activation's gradient writes forward's codes. For experts this would take one more
    tensor."""
    chosen = layer_set(memory.recompute_layers, config.num_layers)
    options = {name: getattr(memory, f"recompute_{name}") for name in Recompute._fields}
    automatic = options["swiglu"] is None
    others = Recompute(swiglu=automatic and config.gated and config.experts is None)
    if automatic:
        options["swiglu"] = others.swiglu
    return [Recompute(**options) if n in chosen else others for n in range(config.num_layers)]


class Stats(NamedTuple):
    """A norm's statistics of rows, F32 (rows,) each, for backward. mean: None with RMSNorm."""

    rstd: Tensor
    mean: Tensor | None


class NormTensors(NamedTuple):
    """The norms in front of a half of one layer, and the residual stream there, see `norms.py`.
    stream: (rows, C). branch: (rows, C), output of the preceding half; None if that half adds to
    the stream itself. stats: statistics of the stream's norm; post_stats: statistics of the
    branch's norm; None without the norm. out: the half's input."""

    stream: Tensor
    branch: Tensor | None
    stats: Stats | None
    post_stats: Stats | None
    out: Activation

    def parameters(self, block: PartParameters[T]) -> tuple[T | None, T | None]:
        """Weight and bias of the stream's norm, or their gradients."""
        return block.get(self.out.name), block.bias(self.out.name)

    def post_weight(self, block: PartParameters[T]) -> T | None:
        return block.get(f"{self.out.name}_post")

    def scale(self, block: PartParameters[T]) -> T | None:
        """The factor of the stream, or the factor's gradient; None without one."""
        return block.get(f"{self.out.name}_scale")


class HalfOut(NamedTuple):
    """Output of a half's last product, (rows, C): out = product [+ addend]."""

    out: Tensor
    addend: Tensor | None = None


class Rings(NamedTuple):
    """Key-value cache of layers with sliding-window attention. Each text has a ring of `length`
    cache blocks, where keys and values of new tokens overwrite keys and values outside the window.
    texts: number of rings. layers: numbers of the layers with a window."""

    texts: int
    length: int
    layers: frozenset[int]

    def table(self, blocks: int) -> np.ndarray:
        """The block number for each text and for each block of its tokens, I32 (texts, blocks)."""
        first = np.arange(self.texts, dtype=np.int32)[:, None] * self.length
        return first + np.arange(blocks, dtype=np.int32) % self.length


class Cache:
    """Keys, values and states of all texts that a Generator continues. blocks: by layer and half,
    tensors (blocks, BLOCK, ...) by the names of HalfSpec.cached; a block holds BLOCK tokens of one
    text. E4M3 keys and values have BF16 factors for each token and head: `scales` (blocks, BLOCK,
    heads, 2). states: by layer and half, F32 tensors (states, ...) by the names of
    HalfSpec.carried; each text has one row. arrived: I32 counters of `ops.attention.paged`, zero at
    the start of a pass."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        dtype: DType,
        blocks: int,
        states: int,
        rings: Rings | None = None,
    ):
        """dtype: the format of keys and values. blocks: number of blocks in a layer without rings.
        states: number of rows of states."""
        self.rings = rings
        heads = max(config.heads_of(layer).query for layer in range(config.num_layers))
        count = (paged.arrivals(states, heads),)
        self.arrived = dev.alloc("paged_arrived", count, I32, "Activations")
        self.blocks: dict[tuple[int, str], dict[str, Tensor]] = {}
        self.states: dict[tuple[int, str], dict[str, Tensor]] = {}
        for layer in range(config.num_layers):
            ringed = rings is not None and layer in rings.layers
            count = rings.texts * rings.length if ringed else blocks
            for spec in config.halves(layer):
                self.blocks[layer, spec.name] = {
                    name: dev.alloc(
                        f"{name}_cache.{layer}", (count, BLOCK, *shape), dtype, "Activations"
                    )
                    for name, shape in spec.cached.items()
                }
                if dtype is E4M3 and spec.cached:
                    shape = (count, BLOCK, next(iter(spec.cached.values()))[0], 2)
                    scales = dev.alloc(f"kv_scales.{layer}", shape, BF16, "Activations")
                    self.blocks[layer, spec.name]["scales"] = scales
                self.states[layer, spec.name] = {
                    name: dev.alloc(f"{name}_carried.{layer}", (states, *shape), F32, "Activations")
                    for name, shape in spec.carried.items()
                }


class Rotary(NamedTuple):
    """RoPE in a layer. table: F32 (positions, Hd/2, 2). channels: number of rotated channels of a
    head. lengths: F32 (positions,), the factor of queries at each position; None: all are 1."""

    table: Tensor
    channels: int
    lengths: Tensor | None


class CacheOfPass(NamedTuple):
    """The cache of a pass over B texts. table: I32 (B, most blocks of a text), block numbers of
    each text. lengths: I32 (B,), number of tokens in each text's blocks before the pass. new: I32
    (B,), number of each text's tokens in the pass, at most T. states: the texts have the rows
    [start, stop) of Cache.states. rope_tables: as in ModelContext. window_table: the `table` of
    layers with rings; None without any."""

    cache: Cache
    table: Tensor
    lengths: Tensor
    new: Tensor
    states: tuple[int, int]
    rope_tables: Sequence[Rotary | None]
    window_table: Tensor | None = None

    def of(self, layer: int, spec: HalfSpec) -> Mapping[str, Tensor]:
        """A half's tensors by name: blocks (HalfSpec.cached) with table, lengths, new and arrived,
        and states (HalfSpec.carried) with one row for each text."""
        states = self.cache.states[layer, spec.name].items()
        tensors = {name: tensor.rows(*self.states) for name, tensor in states}
        source, rings = layer if spec.reads is None else spec.reads, self.cache.rings
        blocks = self.cache.blocks[source, spec.name]
        if not blocks:
            return tensors
        table = self.window_table if rings and source in rings.layers else self.table
        of_texts = {"table": table, "lengths": self.lengths, "new": self.new}
        of_texts["arrived"] = self.cache.arrived
        return tensors | blocks | of_texts


class HalfLayer:
    """A half in one layer. norm: the norms in front of the half. out: where the half's output goes.
    saved: tensors that `Half.keep` has allocated. cache: tensors of the generator's texts; None:
    passes see whole sequences. made_again: True if `recompute` of an MLP or of experts also writes
    `out`."""

    norm: NormTensors
    out: HalfOut
    saved: Any
    made_again = False

    def __init__(
        self,
        dev: Device,
        operands: Operands,
        spec: HalfSpec,
        index: int,
        recompute: Recompute,
        stream: Tensor,
        needed: set[str],
        cache: Mapping[str, Tensor] | None,
    ):
        """stream: (rows, C), the residual stream. needed: the layer's needed_inputs()."""
        self.spec, self.index, self.recompute, self.cache = spec, index, recompute, cache
        self._dev, self._operands, self._needed = dev, operands, needed
        self.rows, self._dtype = stream.shape[0], stream.dtype

    def needs(self, name: str) -> bool:
        """True if a gradient needs the input of this name."""
        return any(m.input == name and m.key in self._needed for m in self.spec.matrices)

    def alloc(self, name: str, *shape: int, dtype: DType | None = None) -> Tensor:
        """Allocate a tensor of this layer. dtype None: the stream's format."""
        dtype = dtype or self._dtype
        return self._dev.alloc(f"{name}.{self.index}", shape, dtype, "Activations")

    def activation(
        self,
        name: str,
        features: int,
        *,
        kept: bool,
        may_be_codes: bool = False,
        dtype: DType | None = None,
        per_row: int = 1,
    ) -> Activation:
        """Return an activation (per_row * rows, features), with memory if `kept`. may_be_codes:
        True if only weights' gradients read the activation in backward."""
        shape, tensor, codes = (self.rows * per_row, features), None, None
        dtype = dtype or self._dtype
        coded = self._operands.kept_codes(self.id_of(name)) if may_be_codes else None
        if kept and coded is not None:
            codes = self.alloc(f"{name}_t", *turned(shape), dtype=coded)
        elif kept:
            tensor = self.alloc(name, *shape, dtype=dtype)
        return Activation(self.index, name, shape, dtype, tensor, codes)

    def id_of(self, name: str) -> str:
        """Name of a gradient of this half, unique in the model."""
        return id_of(self.index, name)

    @property
    def out_id(self) -> str:
        """Name of the gradient of the half's output."""
        return self.id_of(f"d_{self.spec.name}")


class LayerContext(NamedTuple):
    """A pass over one half of a layer. temps: lifetime of the pass's scratch. layer: the half's
    tensors in this layer. w: weights of the block. g: gradients of the block; None in forward.
    before: (rows, C), residual stream in front of the preceding half; None unless backward computes
    the stream again. d_stream: (rows, C), gradient of the stream in front of the half, to which
    norms inside the half add; None in forward. keep: True if backward follows."""

    temps: ExitStack
    layer: HalfLayer
    w: PartWeights
    g: PartGrads | None = None
    before: Tensor | None = None
    d_stream: Tensor | None = None
    keep: bool = False


def scratch_like(dev: Device, temps: ExitStack, name: str, tensor: Tensor) -> Tensor:
    """Scratch with the tensor's shape and format, until the end of `temps`."""
    return temps.enter_context(dev.scratch(name, tensor.shape, tensor.dtype))
