"""References of cu/quantize/fp8_blocks.cu: E4M3 codes with a scale for each block of 128 rows and
128 columns. Blocks at the lower and right edge of a matrix may be smaller."""

import numpy as np

from llmq.base.dtypes import E4M3, E4M3_MAX
from llmq.ref.common import compute, decode_fp8, encode_fp8

BLOCK = 128
LEAST_ABS_MAX = np.float32(1e-10)  # equal to llmq/ref/quantize/quantize.py's

# rows, columns
CASES = {"one_block": (128, 128), "edges": (200, 176), "low": (3, 16), "qwen7b_up": (18944, 3584)}


def _columns(columns: int) -> range:
    return range(0, columns, BLOCK)


def fp8_blocks_encode(codes, scales, x, rows, columns):
    """Reference of fp8_blocks_encode: scale = largest |x| of a block / 448, codes = x / scale.
    codes: E4M3 (rows, columns). scales: F32 (ceil(rows / 128) * ceil(columns / 128),), by row."""
    found = scales.reshape(-1, len(_columns(columns)))
    for i, row in enumerate(range(0, rows, BLOCK)):
        strip = compute(x[row : row + BLOCK])
        largest = np.maximum.reduceat(np.abs(strip).max(axis=0), _columns(columns))
        found[i] = np.maximum(largest, LEAST_ABS_MAX) / np.float32(E4M3_MAX)
        factors = np.repeat(np.float32(1) / found[i], BLOCK)[:columns]
        out = codes[row : row + BLOCK].view(np.uint8)
        encode_fp8(out, strip * factors, np.float32(1), E4M3.numpy)


def fp8_blocks_decode(out, codes, scales, rows, columns):
    """Reference of fp8_blocks_decode: out = code * scale. out, codes: (modules, rows, columns)."""
    of_modules = scales.reshape(len(out), -1, len(_columns(columns)))
    for module, factors in enumerate(of_modules):
        for i, row in enumerate(range(0, rows, BLOCK)):
            strip = slice(row, row + BLOCK)
            values = decode_fp8(codes[module, strip])
            out[module, strip] = values * np.repeat(factors[i], BLOCK)[:columns]
