"""Tensors that a block keeps from forward to backward, and from one token of a text to the next."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from llmq.arch.matrix import HalfSpec
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, I32, DType
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
    """The tensors that a layer computes again in the backward pass instead of keeping them:
    --recompute-…, and what costs nothing."""

    swiglu: bool = False
    norm: bool = False
    ffn: bool = False
    qkv: bool = False
    att: bool = False
    block: bool = False


def recompute_of_layers(memory: MemoryOptions, config: ModelConfig) -> list[Recompute]:
    """For each layer what the options say, or nothing. memory: normalized. If nobody says, a gated
    MLP's activation in fp8 with delayed scales is made again: what computes its gradient writes the
    codes that forward would have written. Experts' is one tensor more."""
    chosen = layer_set(memory.recompute_layers, config.num_layers)
    free = config.gated and config.experts is None
    told = {name: getattr(memory, f"recompute_{name}") for name in Recompute._fields}
    others = Recompute(swiglu=told["swiglu"] is None and free)
    told["swiglu"] = others.swiglu if told["swiglu"] is None else told["swiglu"]
    return [Recompute(**told) if n in chosen else others for n in range(config.num_layers)]


class Stats(NamedTuple):
    """Per-row statistics that the backward pass needs, F32 (rows,). mean is LayerNorm's."""

    rstd: Tensor
    mean: Tensor | None


class NormTensors(NamedTuple):
    """The norms in front of a half of one layer, and the residual stream there, see `norms.py`.
    stream: (rows, C). branch: (rows, C), what the half before has put out; None where it has added
    that to the stream itself. out: the half's input. stats: of the stream's norm, post_stats: of
    the branch's; None where there is none."""

    stream: Tensor
    branch: Tensor | None
    stats: Stats | None
    post_stats: Stats | None
    out: Activation

    def parameters(self, block: PartParameters[T]) -> tuple[T | None, T | None]:
        """Weight and bias of the stream's norm among those of its block, or their gradients."""
        return block.get(self.out.name), block.bias(self.out.name)

    def post_weight(self, block: PartParameters[T]) -> T | None:
        return block.get(f"{self.out.name}_post")

    def scale(self, block: PartParameters[T]) -> T | None:
        """The factor of the stream, or its gradient; None: there is none."""
        return block.get(f"{self.out.name}_scale")


class HalfOut(NamedTuple):
    """Where a half's last product goes, (rows, C): to `out`, with `addend` if there is one."""

    out: Tensor
    addend: Tensor | None = None


class Cache:
    """The tensors that halves keep of texts that are continued. blocks: by layer and half, tensors
    (blocks, BLOCK, ...) by the names of HalfSpec.cached: each holds BLOCK tokens of one text.
    states: the same, F32 (states, ...) by the names of HalfSpec.carried: each row is of one text.
    arrived: I32, of `ops.attention.paged`, zeros at the start of a pass.
    """

    def __init__(self, dev: Device, config: ModelConfig, dtype: DType, blocks: int, states: int):
        heads = max(config.heads_of(layer).query for layer in range(config.num_layers))
        count = (paged.arrivals(states, heads),)
        self.arrived = dev.alloc("paged_arrived", count, I32, "Activations")
        self.blocks: dict[tuple[int, str], dict[str, Tensor]] = {}
        self.states: dict[tuple[int, str], dict[str, Tensor]] = {}
        for layer in range(config.num_layers):
            for spec in config.halves(layer):
                self.blocks[layer, spec.name] = {
                    name: dev.alloc(
                        f"{name}_cache.{layer}", (blocks, BLOCK, *shape), dtype, "Activations"
                    )
                    for name, shape in spec.cached.items()
                }
                self.states[layer, spec.name] = {
                    name: dev.alloc(f"{name}_carried.{layer}", (states, *shape), F32, "Activations")
                    for name, shape in spec.carried.items()
                }


class Rotary(NamedTuple):
    """RoPE in a layer. table: F32 (positions, Hd/2, 2). channels: of a head that are rotated.
    lengths: F32 (positions,), factors of queries; None: they have none."""

    table: Tensor
    channels: int
    lengths: Tensor | None


class CacheOfPass(NamedTuple):
    """The cache as a pass over B texts sees it. table: I32 (B, most blocks of a text), the numbers
    of each text's blocks. lengths: I32 (B,), tokens that the blocks hold before the pass. new: I32
    (B,), the number of the pass's T tokens that belong to each text. states: the first row of the
    states and the one behind the last. rope_tables: as of ModelContext."""

    cache: Cache
    table: Tensor
    lengths: Tensor
    new: Tensor
    states: tuple[int, int]
    rope_tables: Sequence[Rotary | None]

    def of(self, layer: int, spec: HalfSpec) -> Mapping[str, Tensor]:
        """The tensors of a half, by the names of HalfSpec.cached, with table, lengths and new, and
        by those of HalfSpec.carried, one row for each text."""
        states = self.cache.states[layer, spec.name].items()
        found = {name: tensor.rows(*self.states) for name, tensor in states}
        blocks = self.cache.blocks[layer if spec.reads is None else spec.reads, spec.name]
        if not blocks:
            return found
        of_texts = {"table": self.table, "lengths": self.lengths, "new": self.new}
        of_texts["arrived"] = self.cache.arrived
        return found | blocks | of_texts


class HalfLayer:
    """A half in one layer: its tensors there, and those that are kept for backward. norm: in front
    of the half. out: where its output goes. saved: the tensors that `Half.keep` has allocated.
    cache: those of texts that are continued; None: a pass sees whole sequences."""

    norm: NormTensors
    out: HalfOut
    saved: Any

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
        """stream: (rows, C). needed: of the layer, as needed_inputs says."""
        self.spec, self.index, self.recompute, self.cache = spec, index, recompute, cache
        self._dev, self._operands, self._needed = dev, operands, needed
        self.rows, self._dtype = stream.shape[0], stream.dtype

    def needs(self, name: str) -> bool:
        """Whether a gradient needs the input of this name."""
        return any(m.input == name and m.key in self._needed for m in self.spec.matrices)

    def alloc(self, name: str, *shape: int, dtype: DType | None = None) -> Tensor:
        """A tensor of this layer; dtype: as the stream's if it is not given."""
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
        """An activation (rows, features), with memory if it is kept. may_be_codes: backward needs
        it for weights' gradients alone. per_row: how many rows it has of each of the stream's."""
        shape, tensor, codes = (self.rows * per_row, features), None, None
        dtype = dtype or self._dtype
        coded = self._operands.kept_codes(self.id_of(name)) if may_be_codes else None
        if kept and coded is not None:
            codes = self.alloc(f"{name}_t", *turned(shape), dtype=coded)
        elif kept:
            tensor = self.alloc(name, *shape, dtype=dtype)
        return Activation(self.index, name, shape, dtype, tensor, codes)

    def id_of(self, name: str) -> str:
        """The name of a gradient of this half among the tensors of all layers."""
        return id_of(self.index, name)

    @property
    def out_id(self) -> str:
        """The name of the gradient of the half's output."""
        return self.id_of(f"d_{self.spec.name}")


class LayerContext(NamedTuple):
    """A pass over one half of a layer. temps: how long its scratch lives. layer: the half's tensors
    in this layer. w: the weights of the block. g: where the block's gradients go; None in forward.
    before: (rows, C), the residual stream where the half before began; None where backward need not
    make the stream again, and where there is no half before. d_stream: (rows, C), the gradient of
    the stream in front of the half, to which norms inside the half add; None in forward. keep:
    whether backward follows."""

    temps: ExitStack
    layer: HalfLayer
    w: PartWeights
    g: PartGrads | None = None
    before: Tensor | None = None
    d_stream: Tensor | None = None
    keep: bool = False


def scratch_like(dev: Device, temps: ExitStack, name: str, tensor: Tensor) -> Tensor:
    """Scratch of a tensor's shape and format, until the end of `temps`."""
    return temps.enter_context(dev.scratch(name, tensor.shape, tensor.dtype))
