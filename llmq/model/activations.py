"""Activations of a block, which are kept for backward, recomputed in backward, or cached for
generation."""

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
    """The tensors of a layer that backward recomputes and forward does not keep (options
    --recompute-…)."""

    swiglu: bool = False
    norm: bool = False
    ffn: bool = False
    qkv: bool = False
    att: bool = False
    block: bool = False


def recompute_of_layers(memory: MemoryOptions, config: ModelConfig) -> list[Recompute]:
    """Return the Recompute of each layer. memory: options with defaults filled in.

    If recompute_swiglu is None, backward recomputes a gated MLP's activation at no cost: the kernel
    of the activation's gradient also writes forward's codes. For experts this recomputation would
    need one more tensor."""
    chosen = layer_set(memory.recompute_layers, config.num_layers)
    options = {name: getattr(memory, f"recompute_{name}") for name in Recompute._fields}
    automatic = options["swiglu"] is None
    others = Recompute(swiglu=automatic and config.gated and config.experts is None)
    if automatic:
        options["swiglu"] = others.swiglu
    return [Recompute(**options) if n in chosen else others for n in range(config.num_layers)]


class Stats(NamedTuple):
    """Statistics of a norm's rows, each F32 (rows,), which backward reads. mean: None for
    RMSNorm."""

    rstd: Tensor
    mean: Tensor | None


class NormTensors(NamedTuple):
    """The norms before one half of a layer (attention, MLP, ...), and the residual stream there;
    `norms.py` explains the norms. stream: (rows, C). branch: (rows, C), output of the preceding
    half; None if the last product of that half adds to the stream. stats: statistics of the
    stream's norm; post_stats: statistics of the branch's norm; None for a missing norm. out: the
    input of the half, which the norm computes."""

    stream: Tensor
    branch: Tensor | None
    stats: Stats | None
    post_stats: Stats | None
    out: Activation

    def parameters(self, block: PartParameters[T]) -> tuple[T | None, T | None]:
        """Return weight and bias of the stream's norm, or their gradients."""
        return block.get(self.out.name), block.bias(self.out.name)

    def post_weight(self, block: PartParameters[T]) -> T | None:
        return block.get(f"{self.out.name}_post")

    def scale(self, block: PartParameters[T]) -> T | None:
        """Return the factor of the stream, or the factor's gradient; None if the stream has no
        factor."""
        return block.get(f"{self.out.name}_scale")


class HalfOut(NamedTuple):
    """Where the last product of a half writes, (rows, C): out = product [+ addend]."""

    out: Tensor
    addend: Tensor | None = None


class Rings(NamedTuple):
    """The key-value cache of layers with sliding-window attention, a ring buffer per text. The ring
    of a text has `length` cache blocks; keys and values of new tokens overwrite keys and values
    outside of the window. texts: number of rings. layers: indices of the layers with a window."""

    texts: int
    length: int
    layers: frozenset[int]

    def table(self, blocks: int) -> np.ndarray:
        """Return the cache block for each text and each block of the text's tokens, I32 (texts,
        blocks)."""
        first = np.arange(self.texts, dtype=np.int32)[:, None] * self.length
        return first + np.arange(blocks, dtype=np.int32) % self.length


class Cache:
    """Keys, values and states of all texts that a Generator continues. blocks: by layer and half,
    tensors (blocks, BLOCK, ...) with the names of HalfSpec.cached; a block holds BLOCK tokens of
    one text. E4M3 keys and values have BF16 factors for each token and head: `scales` (blocks,
    BLOCK, heads, 2). states: by layer and half, F32 tensors (states, ...) with the names of
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
        """dtype: the dtype of keys and values. blocks: number of cache blocks in a layer without
        rings. states: number of rows of states."""
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
    """The rotary embedding of a layer on the device. table: F32 (positions, Hd/2, 2). channels:
    number of rotated channels of a head. lengths: F32 (positions,), a factor of the queries at each
    position; None if all factors are 1."""

    table: Tensor
    channels: int
    lengths: Tensor | None


class CacheOfPass(NamedTuple):
    """The cache that a pass over B texts reads and extends. table: I32 (B, most blocks of a text),
    the numbers of each text's blocks. lengths: I32 (B,), number of cached tokens of each text
    before the pass. new: I32 (B,), number of each text's tokens in the pass, at most the pass's T
    tokens. states: the range [start, stop) of the texts' rows in Cache.states. rope_tables: the
    Rotary of each layer, as in ModelContext. window_table: the `table` of layers with rings; None
    if no layer has rings."""

    cache: Cache
    table: Tensor
    lengths: Tensor
    new: Tensor
    states: tuple[int, int]
    rope_tables: Sequence[Rotary | None]
    window_table: Tensor | None = None

    def of(self, layer: int, spec: HalfSpec) -> Mapping[str, Tensor]:
        """Return a half's tensors by name: blocks (HalfSpec.cached) with table, lengths, new and
        arrived, and states (HalfSpec.carried) with one row per text."""
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
    """One half of one layer, such as the attention of layer 3. norm: the norms before the half.
    out: the tensor to which the half writes its output. saved: tensors that `Half.keep` has
    allocated. cache: cached tensors of the texts that a generator continues; None if passes see
    whole sequences. made_again: True if `recompute` of an MLP or of experts also writes `out`."""

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
        """stream: (rows, C), the residual stream. needed: names of inputs that gradients need, from
        the layer's needed_inputs()."""
        self.spec, self.index, self.recompute, self.cache = spec, index, recompute, cache
        self._dev, self._operands, self._needed = dev, operands, needed
        self.rows, self._dtype = stream.shape[0], stream.dtype

    def needs(self, name: str) -> bool:
        """Return True if a gradient needs the input of this name."""
        return any(m.input == name and m.key in self._needed for m in self.spec.matrices)

    def alloc(self, name: str, *shape: int, dtype: DType | None = None) -> Tensor:
        """Allocate a tensor of this layer, named after layer and tensor. dtype None: the dtype of
        the stream."""
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
        """Return an activation (per_row * rows, features), with memory until backward if `kept`.
        may_be_codes: True if backward reads the activation only for gradients of weights."""
        shape, tensor, codes = (self.rows * per_row, features), None, None
        dtype = dtype or self._dtype
        coded = self._operands.kept_codes(self.id_of(name)) if may_be_codes else None
        if kept and coded is not None:
            codes = self.alloc(f"{name}_t", *turned(shape), dtype=coded)
        elif kept:
            tensor = self.alloc(name, *shape, dtype=dtype)
        return Activation(self.index, name, shape, dtype, tensor, codes)

    def id_of(self, name: str) -> str:
        """Return the name of a gradient of this half, unique in the model."""
        return id_of(self.index, name)

    @property
    def out_id(self) -> str:
        """Return the name of the gradient of the half's output."""
        return self.id_of(f"d_{self.spec.name}")


class LayerContext(NamedTuple):
    """Arguments of a pass over one half of a layer. temps: the stack of the pass's scratch. layer:
    the half's tensors in this layer. w: the weights of the block. g: the gradients of the block's
    weights; None in forward. before: (rows, C), residual stream before the preceding half; None
    unless backward recomputes the stream. d_stream: (rows, C), gradient of the stream before the
    half, to which norms inside the half add; None in forward. keep: True if backward follows."""

    temps: ExitStack
    layer: HalfLayer
    w: PartWeights
    g: PartGrads | None = None
    before: Tensor | None = None
    d_stream: Tensor | None = None
    keep: bool = False


def scratch_like(dev: Device, temps: ExitStack, name: str, tensor: Tensor) -> Tensor:
    """Return scratch with the tensor's shape and dtype, which lives as long as `temps`."""
    return temps.enter_context(dev.scratch(name, tensor.shape, tensor.dtype))
