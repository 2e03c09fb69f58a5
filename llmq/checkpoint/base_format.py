"""Weights as a run with --base-dtype computed with them: made to codes, and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmq.base.dtypes import E4M3
from llmq.options.option_types import QUANTIZED
from llmq.ref import nf4, quantize, quantize_int8
from llmq.state.params import Param


def as_kept(read: Callable[[Param], np.ndarray], dtype: str | None) -> Callable[..., np.ndarray]:
    """Reads parameters as they are in a base of this format, F32; None, bf16, fp32: as they are.

    read: a parameter of a weight table in its shape.
    """
    if dtype not in QUANTIZED:
        return read
    rounded = {"e4m3": _of_e4m3, "int8": _of_int8, "nf4": _of_nf4}[dtype]

    def read_kept(param: Param) -> np.ndarray:
        values = read(param)
        if not param.block.startswith("layers.") or param.kind != "matrix" or param.of_adapter:
            return values
        return rounded(param, values.reshape(-1)).reshape(param.shape)

    return read_kept


def _of_e4m3(param: Param, x: np.ndarray) -> np.ndarray:
    codes, scale = np.empty(x.size, E4M3.numpy), np.empty(1, np.float32)
    largest = np.array([np.abs(x).max()], np.float32)
    quantize.quantize(codes, scale, x, largest, x.size)
    out = np.empty(x.size, np.float32)
    quantize.dequantize(out, codes, scale, x.size)
    return out


def _of_int8(param: Param, x: np.ndarray) -> np.ndarray:
    x = param.by_row(x)
    codes, scale = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
    quantize_int8.quantize_int8_rows(codes, scale, x, None, None, 0, 1, *x.shape)
    out = np.empty(x.shape, np.float32)
    quantize_int8.quantize_int8_decode(out, codes, scale, *x.shape)
    return out


def _of_nf4(param: Param, x: np.ndarray) -> np.ndarray:
    """Module by module, as state/packing.py does it."""
    out, columns = np.empty(x.size, np.float32), param.columns
    levels = nf4.scale_levels()
    for part in param.hf:
        own = slice(part.start * columns, part.stop * columns)
        n = own.stop - own.start
        half, blocks, num_groups = n // 2, n // nf4.BLOCK, -(-n // nf4.BLOCK // nf4.GROUP)
        codes, scales = np.empty(half, np.uint8), np.empty(blocks, np.float32)
        nf4.nf4_quantize(codes, scales, x[own], n)
        mean = scales.mean(dtype=np.float64, keepdims=True).astype(np.float32)
        scale_codes, groups = np.empty(blocks, np.uint8), np.empty(num_groups, np.float32)
        nf4.nf4_quantize_scales(scale_codes, groups, scales, mean, levels, blocks)
        nf4.nf4_decode(out[own], codes, scale_codes, groups, mean, levels, n)
    return out
