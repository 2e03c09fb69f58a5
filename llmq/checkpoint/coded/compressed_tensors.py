"""Files of compressed-tensors (llm-compressor, vLLM): codes of FP8 or INT8, and their scales.

NAME.weight        F8_E4M3 or I8 (out, in)
NAME.weight_scale  of the whole, of rows (out, 1), of groups of columns, or of blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmq.base.errors import LlmqError
from llmq.checkpoint.coded.fp8 import FP8, put_scaled
from llmq.checkpoint.coded.matrix import take

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


def decode_compressed_tensors(tensors: dict[str, Any], config: Mapping[str, Any]) -> None:
    kind = config.get("format")
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    if kind not in _FORMATS or sparse != "dense":
        raise LlmqError(
            f"quantization_config: the format {kind!r} of compressed-tensors cannot be read, only "
            f"{', '.join(_FORMATS)}"
        )
    blocks = {_block(group.get("weights") or {}) for group in config["config_groups"].values()}
    if len(blocks) > 1:
        raise LlmqError("quantization_config: groups with different scales cannot be read")
    put_scaled(tensors, (*FP8, "I8"), blocks.pop())
    take(tensors, ".input_scale", ".output_scale", ".k_scale", ".v_scale")


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """The part of a matrix that has one scale, as of `scaled`."""
    if not weights.get("symmetric", True):
        raise LlmqError("quantization_config: codes with zero points cannot be read")
    if weights.get("strategy") == "block":
        rows, columns = weights["block_structure"]
        return int(rows), int(columns)
    return (1, int(weights["group_size"])) if weights.get("strategy") == "group" else None
