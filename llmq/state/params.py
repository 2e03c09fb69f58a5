"""THE weight table: every parameter's name, shape, place in memory, decay, init and HF name.

Allocation, sharding, initialization, weight decay, checkpoints, import and export all read it.
Parameters are grouped into slabs: the matrices of each transformer block, "embed", "head" (an LM
head of its own), and "vectors", the norms and biases of all blocks. A slab is one contiguous piece
of memory in every kind of storage (weights, gradients, moments), so that copies, collectives and
the optimizer work on whole blocks; a parameter's place in it is its `offset`, counted in elements
and therefore the same for every dtype. Each of W ranks owns the same number of its elements.

    slab      | embed | layers.0: qkv, o, up, down | layers.1 ... | vectors: ln1, ln2, ... | head |
    rank 0 owns the first 1/W of each slab, rank 1 the second, wherever a parameter ends
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from llmq.base.tensor import Tensor
from llmq.config.model import ModelConfig
from llmq.runtime.arena import align_up

ELEMENT_ALIGN = 128  # elements: 256 bytes of BF16, and a whole number of 16-byte vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class HfPart:
    """A tensor of a Hugging Face checkpoint that holds rows [start, stop) of a parameter.

    transposed: stored (in_features, out_features), as GPT-2's Conv1D does.
    """

    name: str
    start: int
    stop: int
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter.

    name: as in checkpoints. block: what uses it: "embed", "layers.3" or "head". key: its name
    there. shape: with padded rows. decay: weight decay applies. init: "normal", "residual" (normal,
    scaled by 1/sqrt(2L)), "one" or "zero". index: number in the whole model, seeds its random
    numbers. offset: first element in the slab.
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
    def rows(self) -> int:
        """Rows that Hugging Face knows; those behind them are padding and stay zero."""
        return max(part.stop for part in self.hf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A group of parameters that lies contiguously.

    size: elements, gaps and tail included. shard_size: those that each rank owns.
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

    def shard(self, slab: Tensor, rank: int) -> Tensor:
        """The elements that a rank owns inside a tensor of `size` elements."""
        return slab.rows(rank * self.shard_size, (rank + 1) * self.shard_size)

    def pieces(self, start: int, stop: int) -> list[tuple[Param, int, int]]:
        """Parameters with the elements [first, last) of the slab that they have in [start, stop).

        The gap behind a parameter counts as its own, so that pieces are multiples of
        ELEMENT_ALIGN where start and stop are.
        """
        clipped = [(p, max(start, p.offset), min(stop, end)) for p, end in self._ranges()]
        return [(p, first, last) for p, first, last in clipped if first < last]


def by_block(table: tuple[Slab, ...], slabs: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The parameters of whole slabs as tensors, by block and key; slabs may lack some of them."""
    views: dict[str, dict[str, Tensor]] = {}
    for slab in table:
        for param in slab.params if slab.name in slabs else ():
            block = views.setdefault(param.block, {})
            block[param.key] = slab.view(slabs[slab.name], param)
    return views


def _slab(name: str, rows: list[tuple], world_size: int) -> Slab:
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
    size = align_up(offset, ELEMENT_ALIGN * world_size)
    return Slab(name=name, params=tuple(params), size=size, shard_size=size // world_size)


def _whole(name: str, rows: int, transposed: bool = False) -> tuple[HfPart, ...]:
    return (HfPart(name=name, start=0, stop=rows, transposed=transposed),)


def _split(names: list[str], rows: list[int]) -> tuple[HfPart, ...]:
    ends = np.cumsum(rows).tolist()
    return tuple(
        HfPart(name=name, start=end - n, stop=end)
        for name, n, end in zip(names, rows, ends, strict=True)
    )


def _norm(config: ModelConfig, key: str, full: str, hf: str) -> list[tuple]:
    channels = (config.hidden_size,)
    rows = [(key, f"{full}.weight", channels, False, "one", _whole(f"{hf}.weight", channels[0]))]
    if config.norm == "layernorm":
        bias = _whole(f"{hf}.bias", channels[0])
        rows.append((f"{key}_bias", f"{full}.bias", channels, False, "zero", bias))
    return rows


def _linear(
    key: str, full: str, shape: tuple[int, int], bias: bool, init: str, parts: dict[str, int],
    transposed: bool,
) -> list[tuple]:  # fmt: skip
    """parts: the HF modules whose rows, in this order, make up the matrix."""
    names, rows = list(parts), list(parts.values())
    if transposed:
        weight = _whole(f"{names[0]}.weight", shape[0], transposed=True)
    else:
        weight = _split([f"{n}.weight" for n in names], rows)
    table = [(key, f"{full}.weight", shape, True, init, weight)]
    if bias:
        hf_bias = _split([f"{n}.bias" for n in names], rows)
        table.append((f"{key}_bias", f"{full}.bias", shape[:1], False, "zero", hf_bias))
    return table


def _block(config: ModelConfig, layer: int) -> list[tuple]:
    C, F, Hd = config.hidden_size, config.intermediate_size, config.head_dim
    Hq, Hkv, Q = config.num_heads, config.num_kv_heads, config.qkv_channels
    gpt2 = config.architecture == "GPT2LMHeadModel"
    full = f"model.layers.{layer}"
    hf = f"transformer.h.{layer}" if gpt2 else full
    attn = f"{hf}.attn" if gpt2 else f"{hf}.self_attn"
    if gpt2:
        qkv, out = {f"{attn}.c_attn": Q}, {f"{attn}.c_proj": C}
        up, down = {f"{hf}.mlp.c_fc": F}, {f"{hf}.mlp.c_proj": C}
    else:
        qkv = {f"{attn}.q_proj": Hq * Hd, f"{attn}.k_proj": Hkv * Hd, f"{attn}.v_proj": Hkv * Hd}
        up, out = {f"{hf}.mlp.up_proj": F, f"{hf}.mlp.gate_proj": F}, {f"{attn}.o_proj": C}
        down = {f"{hf}.mlp.down_proj": C}
    F2 = sum(up.values())
    name1, name2 = ("ln_1", "ln_2") if gpt2 else ("input_layernorm", "post_attention_layernorm")
    rows = _norm(config, "ln1", f"{full}.input_layernorm", f"{hf}.{name1}")
    rows += _linear("qkv", f"{full}.self_attn.qkv", (Q, C), config.qkv_bias, "normal", qkv, gpt2)
    if config.qk_norm:
        for key in ("q_norm", "k_norm"):
            name = f"{full}.self_attn.{key}.weight"
            rows.append((key, name, (Hd,), False, "one", _whole(name, Hd)))
    rows += _linear(
        "o", f"{full}.self_attn.o_proj", (C, Hq * Hd), config.o_bias, "residual", out, gpt2
    )
    rows += _norm(config, "ln2", f"{full}.post_attention_layernorm", f"{hf}.{name2}")
    rows += _linear("up", f"{full}.mlp.up", (F2, C), config.mlp_bias, "normal", up, gpt2)
    rows += _linear(
        "down", f"{full}.mlp.down_proj", (C, F), config.mlp_bias, "residual", down, gpt2
    )
    return rows


@lru_cache(maxsize=8)  # a search plans hundreds of steps of a few models
def weight_table(config: ModelConfig, world_size: int = 1) -> tuple[Slab, ...]:
    """The slabs of a model: "embed", "layers.0" … "layers.L-1", "vectors", "head" (if untied)."""
    C, V, Vp = config.hidden_size, config.vocab_size, config.padded_vocab
    gpt2 = config.architecture == "GPT2LMHeadModel"
    names = (
        ("transformer.wte", "transformer.ln_f") if gpt2 else ("model.embed_tokens", "model.norm")
    )
    hf_embed = _whole(f"{names[0]}.weight", V)
    blocks = {"embed": [("embed", "model.embed_tokens.weight", (Vp, C), True, "normal", hf_embed)]}
    if config.positions == "learned":
        P = config.max_positions
        hf_positions = _whole("transformer.wpe.weight", P)
        name = "model.position_embedding.weight"
        blocks["embed"].append(("positions", name, (P, C), True, "normal", hf_positions))
    for layer in range(config.num_layers):
        blocks[f"layers.{layer}"] = _block(config, layer)
    blocks["head"] = _norm(config, "norm", "model.norm", names[1])
    if not config.tied_embeddings:
        hf_head = _whole("lm_head.weight", V)
        blocks["head"].append(("lm_head", "lm_head.weight", (Vp, C), True, "normal", hf_head))

    numbered = [(block, *row) for block, rows in blocks.items() for row in rows]
    numbered = [(index, *row) for index, row in enumerate(numbered)]
    groups = {name: [r for r in numbered if r[1] == name and len(r[4]) == 2] for name in blocks}
    head = groups.pop("head")
    groups["vectors"] = [row for row in numbered if len(row[4]) == 1]
    if head:
        groups["head"] = head
    return tuple(_slab(name, rows, world_size) for name, rows in groups.items())


def parameter_count(config: ModelConfig) -> int:
    """Trained parameters, without padding."""
    table = weight_table(config)
    return sum(p.rows * prod(p.shape[1:]) for slab in table for p in slab.params)
