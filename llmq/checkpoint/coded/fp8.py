"""FP8 and INT8 files: codes with a scale a tensor, row, group of columns, or block.

DeepSeek and transformers write

    NAME.weight                                F8_E4M3 (out, in)
    NAME.weight_scale_inv or NAME.weight_scale what codes are multiplied with

and compressed-tensors (llm-compressor, vLLM)

    NAME.weight        F8_E4M3 or I8 (out, in)
    NAME.weight_scale  of the whole, of rows (out, 1), of groups of columns, or of blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmq.base.errors import LlmqError
from llmq.checkpoint.coded.matrix import scaled, take

FP8, SCALES = ("F8_E4M3",), ("_scale_inv", "_scale")


def decode_fp8(tensors: dict[str, Any], config: Mapping[str, Any]) -> None:
    block = config.get("weight_block_size")
    put_scaled(tensors, FP8, None if block is None else (int(block[0]), int(block[1])))
    take(tensors, ".input_scale", ".activation_scale")


def put_scaled(
    tensors: dict[str, Any], dtypes: tuple[str, ...], block: tuple[int, int] | None
) -> None:
    """Decode every tensor of these dtypes, which has scales. block: as of `scaled`."""
    for name in [name for name, tensor in tensors.items() if tensor.dtype in dtypes]:
        codes = tensors[name]
        found = [f"{name}{end}" for end in SCALES if f"{name}{end}" in tensors]
        if len(codes.shape) != 2 or not found:
            raise LlmqError(f"'{codes.path}': {name} is {codes.dtype} without scales")
        try:
            tensors[name] = scaled(codes, tensors.pop(found[0]), block)
        except ValueError as error:
            raise LlmqError(
                f"'{codes.path}': {found[0]} has not as many scales as {name} {list(codes.shape)} "
                "has parts"
            ) from error


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
