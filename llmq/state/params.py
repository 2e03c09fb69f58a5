"""THE weight table: the name, shape, place in memory, decay, initialization and Hugging Face name
of every parameter.

The table follows from the modules that the architecture declares for each block
(`llmq/arch/matrix.py`). Allocation, sharding, initialization, weight decay, checkpoints, import and
export read the table.

Parameters are grouped into slabs: the matrices of each transformer block; "embed" (the token table
and learned positions); "head" (an untied LM head or a score head); "vectors" (norms, biases,
routers and short convolutions of all blocks); "constants". Adapters have the slabs "lora_a",
"lora_b" and "lora_m". Parameters trained beside adapters have further slabs: "norms", "biases",
"mtp" (a head for multi-token prediction) and "new_rows" (rows added to the token tables).

A slab is contiguous in memory, for weights as for gradients and moments, so that copies,
collectives and the optimizer work on whole blocks. A parameter's `offset` in its slab counts
elements, and is therefore the same for every dtype. Each slab is cut into W shards of equal length.

    slab      | embed | layers.0: qkv, o, up, down | layers.1 ... | vectors: ln1, ln2, ... | head |
    shard 0 is the first 1/W of each slab, shard 1 the second, wherever a parameter ends
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from llmq.arch.matrix import HfPart, Matrix, Module
from llmq.arch.model_config import ModelConfig
from llmq.arch.mtp import MTP, mtp_modules
from llmq.base.tensor import Tensor
from llmq.ops.common import padded_columns
from llmq.options.adapters import Adapted, Adapters, all_adapted
from llmq.options.option_types import NEW_PARTS
from llmq.runtime.arena import align_up

PEFT_PREFIX = "base_model.model."
"""Prefix of parameter names in adapter_model.safetensors."""


OF_ROWS = ".token_adapter.trainable_tokens_delta"
"""Suffix of the names of added token rows, as in PEFT's TrainableTokensLayer."""
MAGNITUDES = "lora_m"
"""Slab of DoRA magnitudes, one per row of an adapted matrix; F32, because magnitudes are divided by
F32 norms."""
CONSTANTS = "constants"
"""Slab of F32 numbers that are loaded and never trained."""
LOOKED_UP = "per_layer_table"
"""Slab of a token table from which a step reads only a few rows. The table is in host memory if a
run has one shard and does not train the table."""
NEW_ROWS = "new_rows"
"""Slab and key of the added rows of the embedding and the LM head, which are trained separately."""


SLABS = {"norms": "norms", "embeddings": "embed", "head": "head"}
SLABS |= dict.fromkeys(NEW_PARTS, NEW_ROWS) | {MTP: MTP}
SLABS |= dict.fromkeys(("biases", "adapted-biases"), "biases")
"""The slab that each name in --train means."""


def trained_slabs(adapters: Adapters) -> set[str]:
    """Return the names of the slabs that a run with adapters trains, whether or not the model has
    such slabs."""
    slabs = {"lora_a", "lora_b"} | ({MAGNITUDES} if adapters.dora else set())
    return slabs | {SLABS[part] for part in adapters.train}


ELEMENT_ALIGN = 128  # elements: 256 bytes of BF16, a multiple of 16-byte vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter of the model or of its adapters. name: the name in checkpoints. block: the
    block that uses the parameter, such as "embed", "layers.3" or "head". key: the parameter's name
    in the block. shape: the shape with padding rows. kind, init: as in Module; init may also be
    "adapter" (normal, 1/sqrt(3 in_features)) or "unit" (normal, 1). index: number of the parameter
    in the model, which seeds its random numbers. offset: the parameter's first element in the slab.
    first_row: the row of the block's token table that the parameter's first row replaces; None if
    the parameter replaces no rows. hf: the tensors in Hugging Face files. fused: one tensor that
    files may hold instead of the tensors of hf; None if there is no such tensor."""

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
        """Return the number of elements, padding rows included."""
        return prod(self.shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Return the shape of a row: (columns,), or () if a row is one element of a vector."""
        return self.shape[-1:] if len(self.shape) > 1 else ()

    @property
    def columns(self) -> int:
        return prod(self.row_shape)

    @property
    def table(self) -> str:
        """Return the name of the Hugging Face module whose rows the parameter holds."""
        return self.hf[0].name.removesuffix(OF_ROWS)

    @property
    def transposed_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-2], self.shape[-1], self.shape[-2])

    @property
    def count(self) -> int:
        return sum((p.stop - p.start) * (p.columns or self.columns) for p in self.hf)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges [start, stop) of padding rows between the rows of Hugging Face's
        tensors. Padding rows stay zero."""
        edges = sorted(edge for part in self.hf for edge in (part.start, part.stop))
        return [pair for pair in zip(edges[1::2], edges[2::2], strict=False) if pair[0] < pair[1]]

    @property
    def decay(self) -> bool:
        """Return True if weight decay applies to the parameter."""
        return self.kind in ("matrix", "embedding", "router", "conv")

    def by_row(self, values: np.ndarray) -> np.ndarray:
        """Return an array of the parameter's shape as a list of rows, with experts' rows one after
        another."""
        return values.reshape(-1, *self.row_shape)

    @property
    def is_bias(self) -> bool:
        """Return True if PEFT counts the parameter as a bias: the name ends with ".bias", unlike
        dt_bias of delta nets and gate_up_proj_bias of experts."""
        return self.hf[0].name.endswith(".bias")

    def matrices(self) -> list[tuple[int, int, int]]:
        """Return (first element in the slab, rows, columns) of each Hugging Face matrix, one for
        each expert."""
        found, height = [], self.shape[-2]  # rows of one expert; an HfPart counts all experts' rows
        for part in self.hf:
            for start in range(part.start, part.stop, height):
                rows = min(start + height, part.stop) - start
                found.append((self.offset + start * self.columns, rows, self.columns))
        return sorted(found)

    @property
    def of_adapter(self) -> bool:
        """Return True if the parameter belongs to an adapter."""
        return self.hf[0].name.startswith(PEFT_PREFIX)

    @property
    def rows(self) -> int:
        """Return the number of rows of all experts together, without the padding at the end."""
        return max(part.stop for part in self.hf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """Parameters that are contiguous in memory. size: number of elements, padding included.
    shard_size: number of elements of each shard."""

    name: str
    params: tuple[Param, ...]
    size: int
    shard_size: int

    @property
    def is_block(self) -> bool:
        """Return True if the slab holds the matrices of a transformer block."""
        return self.name.startswith("layers.")

    def _ranges(self) -> list[tuple[Param, int]]:
        """Return each parameter with the element at which the next parameter begins."""
        stops = [p.offset for p in self.params[1:]] + [self.size]
        return list(zip(self.params, stops, strict=True))

    def segments(self) -> np.ndarray:
        """Return int64 (S, 2), a row per parameter: the element at which the parameter's range
        ends, and 1 if weight decay applies."""
        return np.array([(stop, p.decay) for p, stop in self._ranges()], np.int64)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges of padding elements, which belong to no parameter."""
        ends = [(p.offset + p.size, stop) for p, stop in self._ranges()]
        return [(end, stop) for end, stop in ends if end < stop]

    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """Return (first element, rows, columns) of each Hugging Face matrix, one for each
        expert."""
        return tuple(matrix for param in self.params for matrix in param.matrices())

    def per_matrix(self, size: Callable[[int, int], int]) -> Slab:
        """Return a slab that holds a state for each matrix in `matrices`, without padding. The
        parameters' names stay the same. size: function that returns the number of elements of a
        matrix's state."""
        params, offset = [], 0
        for p in self.params:
            count = sum(size(rows, columns) for _, rows, columns in p.matrices())
            part = HfPart(name=p.name, start=0, stop=count)
            params.append(replace(p, shape=(count,), offset=offset, hf=(part,)))
            offset += count
        total = align_up(offset, ELEMENT_ALIGN)
        return replace(self, params=tuple(params), size=total, shard_size=total)

    def alike(self) -> list[tuple[int, int, int, int]]:
        """Return (first element, count, rows, columns) of each run of adjacent matrices of one
        shape. If the first matrix of a run is aligned to 16 bytes in BF16, all matrices of the run
        are aligned."""
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
        """Return the view of a parameter in a tensor of `size` elements."""
        offset = slab.offset + param.offset * slab.dtype.itemsize
        return Tensor(param.name, param.shape, slab.dtype, slab.storage, offset)

    def shard(self, slab: Tensor, index: int) -> Tensor:
        """Return the view of a shard in a tensor of `size` elements."""
        return slab.rows(index * self.shard_size, (index + 1) * self.shard_size)

    def pieces(self, start: int, stop: int) -> list[tuple[Param, int, int]]:
        """Return (param, first, last) for each parameter with elements [first, last) of the slab in
        [start, stop). A piece includes the padding after the parameter, so that lengths of pieces
        are multiples of ELEMENT_ALIGN if start and stop are."""
        clipped = [(p, max(start, p.offset), min(stop, end)) for p, end in self._ranges()]
        return [(p, first, last) for p, first, last in clipped if first < last]


def planes(matrix: Tensor) -> list[Tensor]:
    """Return a matrix (out, in) as a list of one, or the list of experts' matrices of (experts,
    out, in)."""
    if len(matrix.shape) == 2:
        return [matrix]
    return [matrix.rows(i, i + 1).view(*matrix.shape[1:]) for i in range(matrix.shape[0])]


SHARED = ("vectors", CONSTANTS, "norms", "biases", "lora_a", "lora_b", MAGNITUDES, NEW_ROWS)
"""Names of the slabs that hold parameters of several blocks."""


def by_block(table: tuple[Slab, ...], slabs: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the views of the parameters in whole slabs, by block and key; slabs may be missing."""
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
    """Yield a module's weight and, if it has one, its bias."""
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
    blocks = {"embed": config.arch.embedding(config)} | config.arch.beside(config)
    for layer in range(config.num_layers):
        halves = config.halves(layer)
        blocks[f"layers.{layer}"] = tuple(m for h in halves for m in (*h.norms, *h.modules))
    return blocks | {"head": config.arch.head(config)}


@lru_cache(maxsize=8)  # because the search for a recipe plans hundreds of steps of a few models
def weight_table(
    config: ModelConfig, shards: int = 1, adapters: Adapters | None = None
) -> tuple[Slab, ...]:
    """Return the slabs of a model: "embed", "layers.0" … "layers.L-1", "vectors", "head" (if
    untied). Adapters add "lora_a", "lora_b" and, with DoRA, "lora_m". The slabs "norms", "biases",
    "new_rows" and "mtp" hold parameters that are trained beside adapters."""
    train, biased = adapters.train if adapters else (), set()
    if "adapted-biases" in train:
        biased = {(block, f"{m.key}_bias") for block, m in all_adapted(config, adapters)}

    def slab_of(param: Param) -> str:
        if param.kind == "constant":
            return CONSTANTS
        if param.kind == "norm" and "norms" in train:
            return "norms"
        if param.is_bias and ("biases" in train or (param.block, param.key) in biased):
            return "biases"
        return "vectors" if param.kind in ("norm", "vector", "router", "conv") else param.block

    every = (p for block, ms in _modules(config).items() for m in ms for p in _params(block, m))
    last = ("norms", "biases", "vectors", CONSTANTS, "head")
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
    if MTP in train:
        ahead = (param for module in mtp_modules(config) for param in _params(MTP, module))
        for index, param in enumerate(ahead, sum(map(len, groups.values()))):
            name = CONSTANTS if param.kind == "constant" else MTP
            groups.setdefault(name, []).append(replace(param, index=index))
    return tuple(_slab(name, params, shards) for name, params in groups.items())


def _adapter_params(config: ModelConfig, adapters: Adapters) -> dict[str, list[Param]]:
    """Return by slab the parameters of "lora_a" and "lora_b", with DoRA of "lora_m", and added
    token rows if trained. The n adapters of a matrix share A (n * rank, in_features), padded with
    zero rows to `padded_columns`, and B (sum of the adapters' rows, rank); rank is the largest rank
    of these adapters. Magnitudes (out_features,) are ordered like the matrix's rows. The first
    values of magnitudes are the norms of these rows; other code computes the norms."""
    slabs: dict[str, list[Param]] = {"lora_a": [], "lora_b": []}
    for block, matrix in all_adapted(config, adapters):
        a, b = _of_matrix(matrix, block)
        slabs["lora_a"].append(a)
        slabs["lora_b"].append(b)
        if adapters.dora:
            slabs.setdefault(MAGNITUDES, []).append(_magnitudes(matrix, block))
    if config.new_tokens is not None and not {*NEW_PARTS}.isdisjoint(adapters.train):
        slabs[NEW_ROWS] = _new_rows(config, of_head="new-rows" in adapters.train)
    return {name: params for name, params in slabs.items() if params}


def _new_rows(config: ModelConfig, *, of_head: bool) -> list[Param]:
    """Return the added rows of the embedding and, if untied and of_head is True, of the LM head.
    The number of rows is padded to `padded_columns`."""
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
    """Return the embedding and, if untied, the matrix of the LM head, by block."""
    blocks = {"embed": config.arch.embedding(config), "head": config.arch.head(config)}
    return {block: m for block, ms in blocks.items() for m in ms if m.key == TABLES[block]}


TABLES = {"embed": "embed", "head": "lm_head"}
"""The key of the matrix with one row per token, by block."""


def _of_matrix(matrix: Adapted, block: str) -> tuple[Param, Param]:
    """Return the parameters A and B of a matrix's adapters."""
    key, a, b, rows, rank, initial = matrix.key, [], [], 0, matrix.rank, "adapter"
    count = len(matrix.parts)
    if matrix.fused is not None:  # PEFT's ParamWrapper has one A and one B for all experts
        name, rows = f"{PEFT_PREFIX}{matrix.fused.module}", matrix.fused.rows
        a.append(HfPart(name=f"{name}.lora_A.weight", start=0, stop=count * rank))
        b.append(
            HfPart(
                name=f"{name}.lora_B.weight",
                start=0,
                stop=rows,
                experts=count,
                by_rank=True,
                order=matrix.fused.order,
            )
        )
    if block == "embed":  # PEFT transposes both factors: A has a column per token
        (part,), name = matrix.parts, f"{PEFT_PREFIX}{matrix.modules[0]}.lora_embedding_"
        a.append(HfPart(name=f"{name}B", start=0, stop=rank, transposed=True))
        rows, initial = part.stop, "unit"
        b.append(HfPart(name=f"{name}A", start=0, stop=rows, transposed=True))
    one_by_one = () if matrix.fused or block == "embed" else matrix.parts
    for i, (part, start, stop, part_rank, _) in enumerate(one_by_one):
        name, end = f"{PEFT_PREFIX}{part.module}", rows + stop - start
        a.append(HfPart(name=f"{name}.lora_A.weight", start=i * rank, stop=i * rank + part_rank))
        columns = None if part_rank == rank else part_rank
        b.append(
            HfPart(
                name=f"{name}.lora_B.weight",
                start=rows,
                stop=end,
                order=part.order,
                columns=columns,
            )
        )
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
