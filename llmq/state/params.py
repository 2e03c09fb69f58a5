"""THE weight table: every parameter's name, shape, place in memory, decay, init and HF name.

It follows from what the architecture declares (`llmq/arch/matrix.py`), by block.
Allocation, sharding, initialization, weight decay, checkpoints, import and export all read it.
Parameters are grouped into slabs: the matrices of each transformer block, "embed" (the token table
and learned positions), "head" (an LM head of its own, or a score head), and "vectors", the norms,
biases, routers and short convolutions of all blocks. Adapters are "lora_a" and "lora_b", beside
which the norms may be "norms", to be trained alone, biases "biases", and new rows of the token
tables "new_rows". A slab is one contiguous piece of memory in every kind of storage (weights,
gradients, moments), so that copies, collectives and the optimizer work on whole blocks; a
parameter's place in it is its `offset`, counted in elements and therefore the same for every dtype.
Each of W shards has the same number of its elements.

    slab      | embed | layers.0: qkv, o, up, down | layers.1 ... | vectors: ln1, ln2, ... | head |
    shard 0 is the first 1/W of each slab, shard 1 the second, wherever a parameter ends
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from llmq.arch.matrix import HfPart, Matrix, Module
from llmq.arch.model_config import ModelConfig
from llmq.base.tensor import Tensor
from llmq.ops.common import padded_columns
from llmq.options.adapters import Adapted, Adapters, all_adapted
from llmq.options.option_types import NEW_PARTS
from llmq.runtime.arena import align_up

PEFT_PREFIX = "base_model.model."
"""Names of parameters in adapter_model.safetensors begin so."""


OF_ROWS = ".token_adapter.trainable_tokens_delta"
"""Names of rows of a table that are trained alone end so, as PEFT's TrainableTokensLayer has it."""
MAGNITUDES = "lora_m"
"""Slab of the magnitudes of adapted rows, which are in F32: they are divided by norms of F32."""
NEW_ROWS = "new_rows"
"""Slab and key of the rows of embedding and LM head that are trained alone."""


SLABS = {"norms": "norms", "embeddings": "embed", "head": "head"}
SLABS |= dict.fromkeys(NEW_PARTS, NEW_ROWS)
SLABS |= dict.fromkeys(("biases", "adapted-biases"), "biases")
"""By what --train names."""


def trained_slabs(adapters: Adapters) -> set[str]:
    """Names of the slabs that are trained; the model may lack some."""
    own = {"lora_a", "lora_b"} | ({MAGNITUDES} if adapters.dora else set())
    return own | {SLABS[part] for part in adapters.train}


ELEMENT_ALIGN = 128  # elements: 256 bytes of BF16, and a whole number of 16-byte vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter. name: as in checkpoints. block: what uses it: "embed", "layers.3" or "head".
    key: its name there. shape: with padded rows. kind: as of Module. init: as of Module, or
    "adapter" (normal, 1/sqrt(3 in_features)), or "unit" (normal, 1). index: number in the whole
    model, seeds its random numbers. offset: first element in the slab. first_row: of the block's
    token table, whose rows from there on these are; None: it is no part of another parameter.
    fused: one tensor that files may hold instead of those of hf."""

    name: str
    block: str
    key: str
    shape: tuple[int, ...]
    kind: str
    init: str
    hf: tuple[HfPart, ...]
    index: int = 0
    offset: int = 0
    first_row: int | None = None
    fused: HfPart | None = None

    @property
    def size(self) -> int:
        """Elements, padded rows included."""
        return prod(self.shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """(columns,), or () where a row is one element of a vector."""
        return self.shape[-1:] if len(self.shape) > 1 else ()

    @property
    def columns(self) -> int:
        return prod(self.row_shape)

    @property
    def table(self) -> str:
        """The module at Hugging Face of which these are some rows."""
        return self.hf[0].name.removesuffix(OF_ROWS)

    @property
    def transposed_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-2], self.shape[-1], self.shape[-2])

    @property
    def count(self) -> int:
        return sum((p.stop - p.start) * (p.columns or self.columns) for p in self.hf)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Rows [start, stop) between those that Hugging Face knows; they stay zero."""
        edges = sorted(edge for part in self.hf for edge in (part.start, part.stop))
        return [pair for pair in zip(edges[1::2], edges[2::2], strict=False) if pair[0] < pair[1]]

    @property
    def decay(self) -> bool:
        """Whether weight decay applies."""
        return self.kind in ("matrix", "embedding", "router", "conv")

    def by_row(self, values: np.ndarray) -> np.ndarray:
        """An array of its shape with one axis of rows: those of all experts, one after another."""
        return values.reshape(-1, *self.row_shape)

    @property
    def is_bias(self) -> bool:
        """True if PEFT counts the parameter as a bias: the name ends with ".bias", unlike dt_bias
        of delta nets and gate_up_proj_bias of experts."""
        return self.hf[0].name.endswith(".bias")

    @property
    def of_adapter(self) -> bool:
        """Whether it is a part of adapters, which the model itself does not have."""
        return self.hf[0].name.startswith(PEFT_PREFIX)

    @property
    def rows(self) -> int:
        """Rows that Hugging Face knows, of all experts; what follows is padding and stays zero."""
        return max(part.stop for part in self.hf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A group of parameters that lies contiguously. size: elements, gaps and tail included.
    shard_size: those of each shard."""

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

    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Those of Hugging Face, and of every expert: first element, rows and columns of each."""
        found = []
        for param in self.params:
            height = param.shape[-2]  # of all experts one after another, where there are several
            for part in param.hf:
                for start in range(part.start, part.stop, height):
                    rows = min(start + height, part.stop) - start
                    found.append((param.offset + start * param.columns, rows, param.columns))
        return tuple(sorted(found))

    def by_rows(self) -> Slab:
        """A slab of one number for each row of the parameters, one after another without gaps."""
        params, offset = [], 0
        for p in self.params:
            params.append(replace(p, shape=(p.size // p.columns,), offset=offset))
            offset += p.size // p.columns
        size = align_up(offset, ELEMENT_ALIGN)
        return replace(self, params=tuple(params), size=size, shard_size=size)

    def row_of(self, element: int) -> int:
        """The element of `by_rows` that belongs to the row of this one."""
        at = max(i for i, param in enumerate(self.params) if param.offset <= element)
        param = self.params[at]
        return self.by_rows().params[at].offset + (element - param.offset) // param.columns

    def alike(self) -> list[tuple[int, int, int, int]]:
        """`matrices`, of which equal neighbours are taken together: first element, how many there
        are, rows and columns of each. Each begins on 16 bytes of BF16 if the first one does."""
        found: list[tuple[int, int, int, int]] = []
        for at, rows, columns in self.matrices():
            first, count, *shape = found[-1] if found else (0, 0, 0, 0)
            size = rows * columns
            if shape == [rows, columns] and at == first + count * size and size % 8 == 0:
                found[-1] = (first, count + 1, rows, columns)
            else:
                found.append((at, 1, rows, columns))
        return found

    def view(self, slab: Tensor, param: Param) -> Tensor:
        """A parameter inside a tensor of `size` elements."""
        offset = slab.offset + param.offset * slab.dtype.itemsize
        return Tensor(param.name, param.shape, slab.dtype, slab.storage, offset)

    def shard(self, slab: Tensor, index: int) -> Tensor:
        """The elements of a shard inside a tensor of `size` elements."""
        return slab.rows(index * self.shard_size, (index + 1) * self.shard_size)

    def pieces(self, start: int, stop: int) -> list[tuple[Param, int, int]]:
        """Parameters with the elements [first, last) of the slab that they have in [start, stop).
        The gap behind a parameter counts as its own, so that pieces are multiples of ELEMENT_ALIGN
        where start and stop are."""
        clipped = [(p, max(start, p.offset), min(stop, end)) for p, end in self._ranges()]
        return [(p, first, last) for p, first, last in clipped if first < last]


def planes(matrix: Tensor) -> list[Tensor]:
    """A matrix (out, in), or those of all experts (experts, out, in) one by one."""
    if len(matrix.shape) == 2:
        return [matrix]
    return [matrix.rows(i, i + 1).view(*matrix.shape[1:]) for i in range(matrix.shape[0])]


SHARED = ("vectors", "norms", "biases", "lora_a", "lora_b", MAGNITUDES, NEW_ROWS)
"""Slabs of which several blocks have parameters."""


def by_block(table: tuple[Slab, ...], slabs: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The parameters of whole slabs as tensors, by block and key; slabs may lack some of them."""
    views: dict[str, dict[str, Tensor]] = {}
    for slab in table:
        for param in slab.params if slab.name in slabs else ():
            block = views.setdefault(param.block, {})
            block[param.key] = slab.view(slabs[slab.name], param)
    return views


def _slab(name: str, params: Iterable[Param], shards: int) -> Slab:
    placed, offset = [], 0
    for param in params:
        placed.append(replace(param, offset=offset))
        offset += align_up(param.size, ELEMENT_ALIGN)
    size = align_up(offset, ELEMENT_ALIGN * shards)
    return Slab(name=name, params=tuple(placed), size=size, shard_size=size // shards)


def _params(block: str, module: Module) -> Iterator[Param]:
    """A module's weight and bias."""
    whole = module.fused if isinstance(module, Matrix) else None
    yield Param(
        name=f"{module.name}.{module.tensor}", block=block, key=module.key, shape=module.shape,
        kind=module.kind, init=module.initial, hf=module.hf(module.tensor),
        fused=None if whole is None else whole.hf("weight"),
    )  # fmt: skip
    if module.bias:
        yield Param(
            name=f"{module.name}.bias", block=block, key=f"{module.key}_bias",
            shape=(prod(module.shape[:-1] or module.shape),), init="zero", hf=module.hf("bias"),
            kind="norm" if module.kind == "norm" else "vector",
        )  # fmt: skip


def _modules(config: ModelConfig) -> dict[str, tuple[Module, ...]]:
    blocks = {"embed": config.arch.embedding(config)}
    for layer in range(config.num_layers):
        halves = config.halves(layer)
        blocks[f"layers.{layer}"] = tuple(m for h in halves for m in (*h.norms, *h.modules))
    return blocks | {"head": config.arch.head(config)}


@lru_cache(maxsize=8)  # a search plans hundreds of steps of a few models
def weight_table(
    config: ModelConfig, shards: int = 1, adapters: Adapters | None = None
) -> tuple[Slab, ...]:
    """The slabs of a model: "embed", "layers.0" … "layers.L-1", "vectors", "head" (if untied). With
    adapters also "lora_a" and "lora_b", with DoRA "lora_m", and where norms are trained beside
    them, "norms", biases, "biases", or new rows, "new_rows"."""
    train, biased = adapters.train if adapters else (), set()
    if "adapted-biases" in train:
        biased = {(block, f"{m.key}_bias") for block, m in all_adapted(config, adapters)}

    def slab_of(param: Param) -> str:
        if param.kind == "norm" and "norms" in train:
            return "norms"
        if param.is_bias and ("biases" in train or (param.block, param.key) in biased):
            return "biases"
        return "vectors" if param.kind in ("norm", "vector", "router", "conv") else param.block

    every = (p for block, ms in _modules(config).items() for m in ms for p in _params(block, m))
    last = ("norms", "biases", "vectors", "head")
    found: dict[str, list[Param]] = {}
    for param in (replace(param, index=index) for index, param in enumerate(every)):
        found.setdefault(slab_of(param), []).append(param)
    order = [
        *(name for name in found if name not in last),
        *(name for name in last if name in found),
    ]
    groups = {name: found[name] for name in order}
    for name, params in _adapter_params(config, adapters).items() if adapters else ():
        first = sum(map(len, groups.values()))
        groups[name] = [replace(param, index=first + i) for i, param in enumerate(params)]
    return tuple(_slab(name, params, shards) for name, params in groups.items())


def _adapter_params(config: ModelConfig, adapters: Adapters) -> dict[str, list[Param]]:
    """By slab, "lora_a", "lora_b", with DoRA "lora_m" and, where they are trained, the new rows.
    The adapters' A (n * rank, in_features) of a matrix lie below each other, padded with zeros as
    `padded_columns` says; their B (rows of all, rank) do, too. rank: the largest of the matrix.
    Magnitudes (out_features,) are where the matrix has its rows; they begin as the rows' norms, of
    which nobody here knows anything."""
    slabs: dict[str, list[Param]] = {"lora_a": [], "lora_b": []}
    for block, matrix in all_adapted(config, adapters):
        a, b = _of_matrix(matrix, block)
        slabs["lora_a"].append(a)
        slabs["lora_b"].append(b)
        if adapters.dora:
            slabs.setdefault(MAGNITUDES, []).append(_magnitudes(matrix, block))
    if config.new_tokens is not None and not {*NEW_PARTS}.isdisjoint(adapters.train):
        slabs[NEW_ROWS] = _new_rows(config, of_head="new-rows" in adapters.train)
    return slabs


def _new_rows(config: ModelConfig, *, of_head: bool) -> list[Param]:
    """Those of the embedding and, where it is another table, of the LM head, unless that stays;
    padded in number as adapters' columns are."""
    first, stop = config.new_tokens
    rows, shape = stop - first, (padded_columns(stop - first, 1), config.hidden_size)
    tables = token_tables(config)
    return [
        Param(
            name=f"{module.name}.{NEW_ROWS}", block=block, key=NEW_ROWS, shape=shape,
            kind=module.kind, init=module.initial, first_row=first,
            hf=(HfPart(name=module.parts[0].module + OF_ROWS, start=0, stop=rows),),
        )
        for block, module in tables.items() if of_head or block == "embed"
    ]  # fmt: skip


def token_tables(config: ModelConfig) -> dict[str, Module]:
    """The embedding and, where it is another one, the LM head's matrix, by block."""
    blocks = {"embed": config.arch.embedding(config), "head": config.arch.head(config)}
    return {block: m for block, ms in blocks.items() for m in ms if m.key == TABLES[block]}


TABLES = {"embed": "embed", "head": "lm_head"}
"""By block, the key of the matrix that has a row for each token."""


def _of_matrix(matrix: Adapted, block: str) -> tuple[Param, Param]:
    """A and B."""
    key, a, b, rows, rank, initial = matrix.key, [], [], 0, matrix.rank, "adapter"
    count = len(matrix.parts)
    if matrix.fused is not None:  # PEFT's ParamWrapper has all experts in one A and one B
        name, rows = f"{PEFT_PREFIX}{matrix.fused.module}", matrix.fused.rows
        a.append(HfPart(name=f"{name}.lora_A.weight", start=0, stop=count * rank))
        how = {"experts": count, "by_rank": True, "order": matrix.fused.order}
        b.append(HfPart(name=f"{name}.lora_B.weight", start=0, stop=rows, **how))
    if block == "embed":  # PEFT has it transposed: what tokens choose among comes first
        (part,), name = matrix.parts, f"{PEFT_PREFIX}{matrix.modules[0]}.lora_embedding_"
        a.append(HfPart(name=f"{name}B", start=0, stop=rank, transposed=True))
        rows, initial = part.stop, "unit"
        b.append(HfPart(name=f"{name}A", start=0, stop=rows, transposed=True))
    one_by_one = () if matrix.fused or block == "embed" else matrix.parts
    for i, (part, start, stop, own, _) in enumerate(one_by_one):
        name, end = f"{PEFT_PREFIX}{part.module}", rows + stop - start
        a.append(HfPart(name=f"{name}.lora_A.weight", start=i * rank, stop=i * rank + own))
        how = {"order": part.order, "columns": None if own == rank else own}
        b.append(HfPart(name=f"{name}.lora_B.weight", start=rows, stop=end, **how))
        rows = end
    full = f"model.{block}.{key}"
    return (
        Param(
            name=f"{full}.lora_A.weight", block=block, key=f"{key}_a", kind="matrix", init=initial,
            shape=(padded_columns(count, rank), matrix.shape[1]), hf=tuple(a),
        ),
        Param(
            name=f"{full}.lora_B.weight", block=block, key=f"{key}_b", kind="matrix", init="zero",
            shape=(rows, rank), hf=tuple(b),
        ),
    )  # fmt: skip


def _magnitudes(matrix: Adapted, block: str) -> Param:
    parts = (
        (f"{PEFT_PREFIX}{part.module}.lora_magnitude_vector", start, stop, part.order)
        for part, start, stop, _, _ in matrix.parts
    )
    return Param(
        name=f"model.{block}.{matrix.key}.lora_magnitude_vector", block=block,
        key=f"{matrix.key}_m", shape=matrix.shape[:1], kind="vector", init="zero",
        hf=tuple(HfPart(name=n, start=a, stop=b, order=order) for n, a, b, order in parts),
    )  # fmt: skip


def parameter_count(config: ModelConfig) -> int:
    table = weight_table(config)
    return sum(p.count for slab in table for p in slab.params)
