"""Files of bitsandbytes: NF4 codes, the scales of which may be codes too.

NAME                                      U8, two codes a byte, the first in the higher bits
NAME.absmax                               F32 scales of 64 codes, or U8 codes of scales
NAME.quant_map                            F32 (16,), the levels of codes
NAME.nested_absmax, NAME.nested_quant_map F32, the scales of 256 scales and the levels of codes
NAME.quant_state.bitsandbytes__nf4        JSON: shape, sizes of blocks, nested_offset
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from llmq.base.errors import LlmqError
from llmq.checkpoint.coded.matrix import CodedMatrix, Stored, stored_values, take
from llmq.checkpoint.safetensors_file import NUMPY_DTYPES

_STATE = ".quant_state.bitsandbytes__"


def decode_bitsandbytes(tensors: dict[str, Any], config: Mapping[str, Any]) -> None:
    if config.get("load_in_8bit"):
        raise LlmqError("quantization_config: 8 bits of bitsandbytes cannot be read, only nf4")
    states = {name.partition(_STATE)[0]: name for name in tensors if _STATE in name}
    for name, state in states.items():
        kind = state.partition(_STATE)[2]
        if kind != "nf4":
            raise LlmqError(f"'{tensors[state].path}': {name} is {kind}, which cannot be read")
        tensors[name] = _matrix(name, tensors, tensors[state])
    parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    take(tensors, *(f"{name}.{part}" for name in states for part in parts), f"{_STATE}nf4")


def _matrix(name: str, tensors: Mapping[str, Stored], state: Stored) -> CodedMatrix:
    codes = tensors[name]
    try:
        known = json.loads(stored_values(state).tobytes())
        shape, block = tuple(map(int, known["shape"])), int(known["blocksize"])
        scales = stored_values(tensors[f"{name}.absmax"])
        if "nested_blocksize" in known:
            levels = stored_values(tensors[f"{name}.nested_quant_map"])
            groups = stored_values(tensors[f"{name}.nested_absmax"])
            of_scale = np.arange(scales.size) // int(known["nested_blocksize"])
            offset = np.float32(known["nested_offset"])
            scales = levels[scales] * groups[of_scale] + offset
        levels = stored_values(tensors[f"{name}.quant_map"]).astype(np.float32)
        size = NUMPY_DTYPES[codes.dtype].itemsize
        whole = (scales.size * block, 2 * prod(codes.shape) * size, levels.size)
        if whole != (-(-prod(shape) // block) * block, prod(shape), 16) or block % (2 * size):
            raise ValueError(f"sizes {shape}, {codes.shape}, {scales.shape}, {levels.shape}")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LlmqError(f"'{codes.path}': the codes of {name} are damaged ({error!r})") from error

    def decode(start: int, stop: int) -> np.ndarray:
        columns = prod(shape[1:])
        first, last = start * columns // block, -(-stop * columns // block)
        end = min(last * block // 2 // size, prod(codes.shape))
        pairs = stored_values(codes, first * block // 2 // size, end).view(np.uint8)
        values = np.stack([levels[pairs >> 4], levels[pairs & 15]], axis=-1).reshape(-1)
        values *= np.repeat(scales[first:last], block)[: values.size]
        skipped = start * columns - first * block
        return values[skipped : skipped + (stop - start) * columns].reshape(-1, *shape[1:])

    return CodedMatrix(codes, shape, decode)
