"""FP8 files as DeepSeek and transformers write them: codes with a scale a tensor, row, or block.

NAME.weight                                F8_E4M3 (out, in)
NAME.weight_scale_inv or NAME.weight_scale what codes are multiplied with
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
