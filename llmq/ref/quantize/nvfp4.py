"""References of cu/quantize/nvfp4.cu: codes of 4 bits (E2M1), a scale (E4M3) for each 16 codes, and
a factor (F32) for a module. A byte holds two codes, the first in the lower bits."""

import numpy as np

from llmq.base.dtypes import E4M3, E4M3_MAX
from llmq.ref.common import (
    MXFP4_LEVELS,
    compute,
    decode_fp8,
    e2m1_levels,
    encode_fp8,
    row_blocks,
)

BLOCK = 16
LEAST_ABS_MAX = np.float32(1e-10)  # equal to llmq/ref/quantize/quantize.py's
LEVEL_MAX = np.float32(6)
LEAST_SCALE = np.float32(2.0**-9)  # smallest E4M3 number above 0
EDGES = (MXFP4_LEVELS[1:] + MXFP4_LEVELS[:-1]) / 2

# elements
CASES = {"one_block": (16,), "ragged": (5 * 1024 + 48,), "qwen7b_up": (18944 * 3584,)}


def nvfp4_encode(codes, scales, factor, x, abs_max, n):
    """Reference of nvfp4_encode. factor F32 (1,): abs_max / (448 * 6). scales E4M3 (n/16,): the
    largest |x| of a block / 6 / factor. codes U8 (n/2,): the nearest levels, ties to even. abs_max:
    the largest |x|."""
    factor[0] = np.maximum(abs_max[0], LEAST_ABS_MAX) / (np.float32(E4M3_MAX) * LEVEL_MAX)
    blocks = x.reshape(-1, BLOCK)
    for part in row_blocks(n // BLOCK, BLOCK):
        values = compute(blocks[part])
        wanted = np.abs(values).max(axis=1) / LEVEL_MAX / factor[0]
        encode_fp8(
            scales[part].view(np.uint8), np.maximum(wanted, LEAST_SCALE), np.float32(1), E4M3.numpy
        )
        size = np.abs(values) / (decode_fp8(scales[part, None]) * factor[0])
        code = np.zeros(size.shape, np.uint8)
        for number, edge in enumerate(EDGES):
            code += size >= edge if number % 2 else size > edge
        code |= np.signbit(values).astype(np.uint8) << 3
        pairs = code.reshape(-1, 2)
        half = slice(part.start * BLOCK // 2, part.start * BLOCK // 2 + len(pairs))
        codes[half] = pairs[:, 0] | pairs[:, 1] << 4


def nvfp4_decode(out, codes, scales, factors, n):
    """Reference of nvfp4_decode: out = level * (scale * factor). out, codes and scales hold modules
    of n elements, one after another; factors has one factor for each module."""
    blocks, pairs = out.reshape(-1, BLOCK), codes.reshape(-1, BLOCK // 2)
    of_blocks = decode_fp8(scales[:, None]) * np.repeat(factors, n // BLOCK)[:, None]
    with np.errstate(invalid="ignore"):  # a file's factors may be NaN or infinite
        for part in row_blocks(len(blocks), BLOCK):
            blocks[part] = e2m1_levels(pairs[part]) * of_blocks[part]
