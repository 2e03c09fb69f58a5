"""The rows of the weight table that adapters add, and which slabs of it they freeze."""

from __future__ import annotations

from llmq.arch.matrix import HfPart
from llmq.arch.model_config import ModelConfig
from llmq.ops.common import padded_columns
from llmq.options.adapters import Adapted, Adapters, all_adapted

PEFT_PREFIX = "base_model.model."
"""Names of parameters in adapter_model.safetensors begin so."""


def adapter_rows(config: ModelConfig, adapters: Adapters) -> dict[str, list[tuple]]:
    """By slab, "lora_a" and "lora_b": (block, key, full name, shape, kind, init, hf parts).

    The adapters' A (n * rank, in_features) of a matrix lie below each other, padded with zeros as
    `padded_columns` says; their B (rows of all, rank) do, too.
    """
    slabs: dict[str, list[tuple]] = {"lora_a": [], "lora_b": []}
    for layer, matrix in all_adapted(config, adapters.targets):
        for slab, row in zip(slabs, _rows(matrix, layer, adapters.rank), strict=True):
            slabs[slab].append(row)
    return slabs


def _rows(matrix: Adapted, layer: int, rank: int) -> tuple[tuple, tuple]:
    block, key, a, b, rows = f"layers.{layer}", matrix.key, [], [], 0
    for i, (part, start, stop) in enumerate(matrix.parts):
        name, end = f"{PEFT_PREFIX}{part.module}", rows + stop - start
        a.append(HfPart(name=f"{name}.lora_A.weight", start=i * rank, stop=(i + 1) * rank))
        b.append(HfPart(name=f"{name}.lora_B.weight", start=rows, stop=end, swapped=part.swapped))
        rows = end
    full = f"model.{block}.{key}"
    shape_a, shape_b = (padded_columns(len(a), rank), matrix.shape[1]), (rows, rank)
    return (
        (block, f"{key}_a", f"{full}.lora_A.weight", shape_a, "matrix", "adapter", tuple(a)),
        (block, f"{key}_b", f"{full}.lora_B.weight", shape_b, "matrix", "zero", tuple(b)),
    )


SLABS = {"norms": "norms", "embeddings": "embed", "head": "head"}
"""By what --train names."""


def trained_slabs(adapters: Adapters) -> set[str]:
    """Names of the slabs that are trained; the model may lack some."""
    return {"lora_a", "lora_b"} | {SLABS[part] for part in adapters.train}
