"""The rows of the weight table that adapters add, and which slabs of it they freeze."""

from __future__ import annotations

from llmq.arch.matrix import HfPart, Module
from llmq.arch.model_config import ModelConfig
from llmq.ops.common import padded_columns
from llmq.options.adapters import Adapted, Adapters, all_adapted
from llmq.options.option_types import NEW_PARTS

PEFT_PREFIX = "base_model.model."
"""Names of parameters in adapter_model.safetensors begin so."""


OF_ROWS = ".token_adapter.trainable_tokens_delta"
"""Names of rows of a table that are trained alone end so, as PEFT's TrainableTokensLayer has it."""
MAGNITUDES = "lora_m"
"""Slab of the magnitudes of adapted rows, which are in F32: they are divided by norms of F32."""
NEW_ROWS = "new_rows"
"""Slab and key of the rows of embedding and LM head that are trained alone."""


def adapter_rows(config: ModelConfig, adapters: Adapters) -> dict[str, list[tuple]]:
    """By slab, "lora_a", "lora_b", with DoRA "lora_m" and, where they are trained, the new rows:
    (block, key, full name, shape, kind, init, hf parts, first row).

    The adapters' A (n * rank, in_features) of a matrix lie below each other, padded with zeros as
    `padded_columns` says; their B (rows of all, rank) do, too. rank: the largest of the matrix.
    Magnitudes (out_features,) are where the matrix has its rows; they begin as the rows' norms, of
    which nobody here knows anything.
    """
    slabs: dict[str, list[tuple]] = {"lora_a": [], "lora_b": []}
    for block, matrix in all_adapted(config, adapters):
        a, b = _rows(matrix, block)
        slabs["lora_a"].append(a)
        slabs["lora_b"].append(b)
        if adapters.dora:
            slabs.setdefault(MAGNITUDES, []).append(_magnitudes(matrix, block))
    if config.new_tokens is not None and not {*NEW_PARTS}.isdisjoint(adapters.train):
        slabs[NEW_ROWS] = _new_rows(config, of_head="new-rows" in adapters.train)
    return slabs


def _new_rows(config: ModelConfig, *, of_head: bool) -> list[tuple]:
    """Those of the embedding and, where it is another table, of the LM head, unless that stays;
    padded in number as adapters' columns are."""
    first, stop = config.new_tokens
    rows, shape = stop - first, (padded_columns(stop - first, 1), config.hidden_size)
    found = []
    tables = token_tables(config)
    for block, module in tables.items() if of_head else [("embed", tables["embed"])]:
        parts = (HfPart(name=module.parts[0].module + OF_ROWS, start=0, stop=rows),)
        full = f"{module.name}.{NEW_ROWS}"
        found.append((block, NEW_ROWS, full, shape, module.kind, module.initial, parts, first))
    return found


def token_tables(config: ModelConfig) -> dict[str, Module]:
    """The embedding and, where it is another one, the LM head's matrix, by block."""
    blocks = {"embed": config.arch.embedding(config), "head": config.arch.head(config)}
    return {block: m for block, ms in blocks.items() for m in ms if m.key == TABLES[block]}


TABLES = {"embed": "embed", "head": "lm_head"}
"""By block, the key of the matrix that has a row for each token."""


def _rows(matrix: Adapted, block: str) -> tuple[tuple, tuple]:
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
    shape_a, shape_b = (padded_columns(count, rank), matrix.shape[1]), (rows, rank)
    return (
        (block, f"{key}_a", f"{full}.lora_A.weight", shape_a, "matrix", initial, tuple(a)),
        (block, f"{key}_b", f"{full}.lora_B.weight", shape_b, "matrix", "zero", tuple(b)),
    )


def _magnitudes(matrix: Adapted, block: str) -> tuple:
    parts = tuple(
        HfPart(
            name=f"{PEFT_PREFIX}{part.module}.lora_magnitude_vector",
            start=start,
            stop=stop,
            order=part.order,
        )
        for part, start, stop, _, _ in matrix.parts
    )
    key, shape = matrix.key, matrix.shape[:1]
    full = f"model.{block}.{key}.lora_magnitude_vector"
    return block, f"{key}_m", full, shape, "vector", "zero", parts


SLABS = {"norms": "norms", "embeddings": "embed", "head": "head"}
SLABS |= dict.fromkeys(NEW_PARTS, NEW_ROWS)
SLABS |= dict.fromkeys(("biases", "adapted-biases"), "biases")
"""By what --train names."""


def trained_slabs(adapters: Adapters) -> set[str]:
    """Names of the slabs that are trained; the model may lack some."""
    own = {"lora_a", "lora_b"} | ({MAGNITUDES} if adapters.dora else set())
    return own | {SLABS[part] for part in adapters.train}
