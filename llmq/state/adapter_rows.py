"""The rows of the weight table that adapters add, and which slabs of it they freeze."""

from __future__ import annotations

from itertools import pairwise

from llmq.arch.common import HfPart
from llmq.arch.model_config import ModelConfig
from llmq.ops.common import padded_columns
from llmq.options.adapters import Adapted, Adapters, adapted_matrices

PEFT_PREFIX = "base_model.model."
"""Of the names of parameters in adapter_model.safetensors."""


def adapter_rows(config: ModelConfig, adapters: Adapters) -> dict[str, list[tuple]]:
    """By slab, "lora_a" and "lora_b": (block, key, full name, shape, decay, init, hf parts).

    Of a matrix, the adapters' A (n * rank, in_features) lie below each other, padded with zeros as
    `padded_columns` says; their B (rows of all, rank) do, too.
    """
    slabs: dict[str, list[tuple]] = {"lora_a": [], "lora_b": []}
    matrices = adapted_matrices(config, adapters.targets)
    for layer in range(config.num_layers):
        for matrix in matrices:
            for slab, row in zip(slabs, _rows(matrix, layer, adapters.rank), strict=True):
                slabs[slab].append(row)
    return slabs


def _rows(matrix: Adapted, layer: int, rank: int) -> tuple[tuple, tuple]:
    count, block, key = len(matrix.modules), f"layers.{layer}", matrix.key
    counts = [stop - start for start, stop in matrix.spans]
    edges = [sum(counts[:i]) for i in range(count + 1)]
    names = [f"{PEFT_PREFIX}{module.format(layer)}" for module in matrix.modules]
    a = tuple(
        HfPart(name=f"{name}.lora_A.weight", start=i * rank, stop=(i + 1) * rank)
        for i, name in enumerate(names)
    )
    b = tuple(
        HfPart(name=f"{name}.lora_B.weight", start=start, stop=stop, swapped=matrix.swapped)
        for name, (start, stop) in zip(names, pairwise(edges), strict=True)
    )
    full = f"model.{block}.{key}"
    shape_a, shape_b = (padded_columns(count, rank), matrix.shape[1]), (edges[-1], rank)
    return (
        (block, f"{key}_a", f"{full}.lora_A.weight", shape_a, True, "adapter", a),
        (block, f"{key}_b", f"{full}.lora_B.weight", shape_b, True, "zero", b),
    )


SLABS = {"norms": "norms", "embeddings": "embed", "head": "head"}
"""By what --train names."""


def trained_slabs(adapters: Adapters) -> set[str]:
    """Names of the slabs that are trained; the model may lack some."""
    return {"lora_a", "lora_b"} | {SLABS[part] for part in adapters.train}
