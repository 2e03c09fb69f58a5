"""THE weight table: every parameter's name, shape, place in memory, decay, init and HF name.

Allocation, sharding, initialization, weight decay, checkpoints, import and export all read it.
Parameters are grouped into slabs: the matrices of each transformer block, "embed", "head" (an LM
head of its own), and "vectors", the norms and biases of all blocks. Adapters are "lora_a" and
"lora_b", beside which the norms may be "norms", to be trained alone. A slab is one contiguous piece
of memory in every kind of storage (weights, gradients, moments), so that copies, collectives and
the optimizer work on whole blocks; a parameter's place in it is its `offset`, counted in elements
and therefore the same for every dtype. Each of W shards has the same number of its elements.

    slab      | embed | layers.0: qkv, o, up, down | layers.1 ... | vectors: ln1, ln2, ... | head |
    shard 0 is the first 1/W of each slab, shard 1 the second, wherever a parameter ends
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod

import numpy as np

from llmq.arch.common import HfPart
from llmq.arch.model_config import ModelConfig
from llmq.base.tensor import Tensor
from llmq.options.adapters import Adapters
from llmq.runtime.arena import align_up
from llmq.state.adapter_rows import PEFT_PREFIX, adapter_rows

NORMS = {"ln1_post", "ln1", "ln1_bias", "q_norm", "k_norm", "ln2_post", "ln2", "ln2_bias"}
NORMS |= {"norm", "norm_bias"}
"""Keys of the parameters of norms."""

ELEMENT_ALIGN = 128  # elements: 256 bytes of BF16, and a whole number of 16-byte vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter.

    name: as in checkpoints. block: what uses it: "embed", "layers.3" or "head". key: its name
    there. shape: with padded rows. decay: weight decay applies. init: "normal", "residual" (normal,
    scaled by 1/sqrt(2L)), "adapter" (normal, 1/sqrt(3 in_features)), "one" or "zero". index: number
    in the whole model, seeds its random numbers. offset: first element in the slab.
    """

    name: str
    block: str
    key: str
    shape: tuple[int, ...]
    decay: bool
    init: str
    index: int
    offset: int
    hf: tuple[HfPart, ...]

    @property
    def size(self) -> int:
        """Elements, padded rows included."""
        return prod(self.shape)

    @property
    def count(self) -> int:
        """Elements without padding."""
        return self.rows * prod(self.shape[1:])

    @property
    def of_adapter(self) -> bool:
        """Whether it is a part of adapters, which the model itself does not have."""
        return self.hf[0].name.startswith(PEFT_PREFIX)

    @property
    def rows(self) -> int:
        """Rows that Hugging Face knows; those behind them are padding and stay zero."""
        return max(part.stop for part in self.hf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A group of parameters that lies contiguously.

    size: elements, gaps and tail included. shard_size: those of each shard.
    """

    name: str
    params: tuple[Param, ...]
    size: int
    shard_size: int

    @property
    def is_block(self) -> bool:
        """Whether these are the matrices of a transformer block."""
        return self.name.startswith("layers.")

    def _ranges(self) -> list[tuple[Param, int]]:
        """Parameters, each with the element where the next one begins."""
        stops = [p.offset for p in self.params[1:]] + [self.size]
        return list(zip(self.params, stops, strict=True))

    def segments(self) -> np.ndarray:
        """int64 (S, 2): the element each parameter's range ends at, and whether it decays."""
        return np.array([(stop, p.decay) for p, stop in self._ranges()], np.int64)

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of elements that belong to no parameter."""
        ends = [(p.offset + p.size, stop) for p, stop in self._ranges()]
        return [(end, stop) for end, stop in ends if end < stop]

    def view(self, slab: Tensor, param: Param) -> Tensor:
        """A parameter inside a tensor of `size` elements."""
        offset = slab.offset + param.offset * slab.dtype.itemsize
        return Tensor(param.name, param.shape, slab.dtype, slab.storage, offset)

    def shard(self, slab: Tensor, index: int) -> Tensor:
        """The elements of a shard inside a tensor of `size` elements."""
        return slab.rows(index * self.shard_size, (index + 1) * self.shard_size)

    def pieces(self, start: int, stop: int) -> list[tuple[Param, int, int]]:
        """Parameters with the elements [first, last) of the slab that they have in [start, stop).

        The gap behind a parameter counts as its own, so that pieces are multiples of
        ELEMENT_ALIGN where start and stop are.
        """
        clipped = [(p, max(start, p.offset), min(stop, end)) for p, end in self._ranges()]
        return [(p, first, last) for p, first, last in clipped if first < last]


SHARED = ("vectors", "norms", "lora_a", "lora_b")
"""Slabs of which several blocks have parameters."""


def by_block(table: tuple[Slab, ...], slabs: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The parameters of whole slabs as tensors, by block and key; slabs may lack some of them."""
    views: dict[str, dict[str, Tensor]] = {}
    for slab in table:
        for param in slab.params if slab.name in slabs else ():
            block = views.setdefault(param.block, {})
            block[param.key] = slab.view(slabs[slab.name], param)
    return views


def _slab(name: str, rows: list[tuple], shards: int) -> Slab:
    """rows: (index, block, key, full name, shape, decay, init, hf parts)."""
    params, offset = [], 0
    for index, block, key, full, shape, decay, init, hf in rows:
        params.append(
            Param(
                name=full, block=block, key=key, shape=shape, decay=decay, init=init,
                index=index, offset=offset, hf=hf,
            )
        )  # fmt: skip
        offset += align_up(prod(shape), ELEMENT_ALIGN)
    size = align_up(offset, ELEMENT_ALIGN * shards)
    return Slab(name=name, params=tuple(params), size=size, shard_size=size // shards)


def _rows(
    config: ModelConfig,
    key: str,
    module: str,
    shape: tuple[int, ...],
    parts: list[int] | None = None,
    *,
    bias: bool = False,
    layer: int | None = None,
) -> list[tuple]:
    """A module's weight and bias. parts: rows of what Hugging Face may store one by one."""
    arch, matrix, parts = config.arch, len(shape) == 2, parts or [shape[0]]
    one = "zero" if arch.norm_offset else "one"
    init = arch.initial.get(key, "normal") if matrix else one
    weight = arch.parts(key, "weight", parts, layer)
    rows = [(key, f"{module}.weight", shape, matrix, init, weight)]
    if bias:
        hf = arch.parts(key, "bias", parts, layer)
        rows.append((f"{key}_bias", f"{module}.bias", shape[:1], False, "zero", hf))
    return rows


def _norm(config: ModelConfig, key: str, layer: int) -> list[tuple]:
    """A norm of a block, or of the head, which is layer L; nothing where there is none."""
    names, shape, bias = config.arch.norm_names, (config.hidden_size,), config.norm == "layernorm"
    layer = layer - 1 if key == "ln1_post" else layer
    if key not in names or layer < 0:
        return []
    return _rows(config, key, f"model.layers.{layer}.{names[key]}", shape, bias=bias, layer=layer)


def _block(config: ModelConfig, layer: int) -> list[tuple]:
    C, F, Hd = config.hidden_size, config.intermediate_size, config.head_dim
    Hq, Hkv, Q = config.num_heads, config.num_kv_heads, config.qkv_channels
    up, mlp_bias = [F, F] if config.gated else [F], config.mlp_bias
    full = f"model.layers.{layer}"
    rows = partial(_rows, config, layer=layer)
    qkv = [Hq * Hd, Hkv * Hd, Hkv * Hd]

    table = _norm(config, "ln1_post", layer) + _norm(config, "ln1", layer)
    table += rows("qkv", f"{full}.self_attn.qkv", (Q, C), qkv, bias=config.qkv_bias)
    if config.qk_norm:
        heads = (Hq, Hkv) if config.arch.wide_qk_norm else (1, 1)
        table += rows("q_norm", f"{full}.self_attn.q_norm", (heads[0] * Hd,))
        table += rows("k_norm", f"{full}.self_attn.k_norm", (heads[1] * Hd,))
    table += rows("o", f"{full}.self_attn.o_proj", (C, Hq * Hd), bias=config.o_bias)
    table += _norm(config, "ln2_post", layer) + _norm(config, "ln2", layer)
    table += rows("up", f"{full}.mlp.up", (sum(up), C), up, bias=mlp_bias)
    table += rows("down", f"{full}.mlp.down_proj", (C, F), bias=mlp_bias)
    return table


@lru_cache(maxsize=8)  # a search plans hundreds of steps of a few models
def weight_table(
    config: ModelConfig, shards: int = 1, adapters: Adapters | None = None
) -> tuple[Slab, ...]:
    """The slabs of a model: "embed", "layers.0" … "layers.L-1", "vectors", "head" (if untied).

    With adapters also "lora_a" and "lora_b", and where norms are trained beside them, "norms".
    """
    C, V, Vp = config.hidden_size, config.vocab_size, config.padded_vocab
    blocks = {"embed": _rows(config, "embed", "model.embed_tokens", (Vp, C), [V])}
    if config.positions == "learned":
        shape = (config.max_positions, C)
        blocks["embed"] += _rows(config, "positions", "model.position_embedding", shape)
    for layer in range(config.num_layers):
        blocks[f"layers.{layer}"] = _block(config, layer)
    centred = config.norm == "layernorm"
    blocks["head"] = _norm(config, "ln1_post", config.num_layers)
    blocks["head"] += _rows(config, "norm", "model.norm", (C,), bias=centred)
    if not config.tied_embeddings:
        blocks["head"] += _rows(config, "lm_head", "lm_head", (Vp, C), [V])

    numbered = [(block, *row) for block, rows in blocks.items() for row in rows]
    numbered = [(index, *row) for index, row in enumerate(numbered)]
    groups = {name: [r for r in numbered if r[1] == name and len(r[4]) == 2] for name in blocks}
    head = groups.pop("head")
    vectors = [row for row in numbered if len(row[4]) == 1]
    if adapters is not None and "norms" in adapters.train:
        groups["norms"] = [row for row in vectors if row[2] in NORMS]
        vectors = [row for row in vectors if row[2] not in NORMS]
    if vectors:
        groups["vectors"] = vectors
    if head:
        groups["head"] = head
    for name, rows in adapter_rows(config, adapters).items() if adapters else ():
        first = sum(map(len, groups.values()))
        groups[name] = [(first + i, *row) for i, row in enumerate(rows)]
    return tuple(_slab(name, rows, shards) for name, rows in groups.items())


def parameter_count(config: ModelConfig) -> int:
    """Trained parameters, without padding."""
    table = weight_table(config)
    return sum(p.count for slab in table for p in slab.params)
