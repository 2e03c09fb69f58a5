"""References of cu/quantize/four_bits.cu: NF4, with coded scales of blocks of 64; and MXFP4."""

import functools

import numpy as np

from llmq.ref.common import (
    MXFP4_BIAS,
    MXFP4_BLOCK,
    MXFP4_LEVELS,
    NF4_LEVELS,
    compute,
    encode_fp8,
    mxfp4_blocks,
    nf4_blocks,
    row_blocks,
)
from llmq.ref.common import NF4_BLOCK as BLOCK
from llmq.ref.common import NF4_GROUP as GROUP

LEAST = np.float32(1e-38)  # gives blocks of zeros a finite factor

# elements
CASES = {
    "one_block": (64,),
    "less_than_a_group": (64 * 100,),
    "one_group": (64 * 256,),
    "ragged": (64 * 700,),
    "qwen7b_up": (18944 * 3584,),
}

EDGES = (NF4_LEVELS[:-1] + NF4_LEVELS[1:]) / np.float32(2)


@functools.cache
def scale_levels() -> np.ndarray:
    """Return the levels of scales' codes, F32 (256,), ascending and read-only: bitsandbytes' signed
    dynamic 8-bit levels (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021). Each
    decade from 1e-6 to 1 has twice as many levels as the decade before; the levels are the middles
    of equal parts of the decade. 0 and 1 are levels, too."""
    levels = [np.float32(0), np.float32(1)]
    for order in range(7):
        # Steps are torch.linspace's, from the nearer end: one rounding of a value exact in F64.
        count = 2**order + 1
        index = np.arange(count)
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(count - 1))
        below, above = np.float32(0.1) + index * step, 1 - (count - 1 - index) * step
        edges = np.where(index < count // 2, below, above).astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / 2 * np.float32(10.0 ** (order - 6))
        levels += [*middles, *-middles]
    found = np.sort(np.array(levels, np.float32))
    found.setflags(write=False)
    return found


def nf4_quantize(codes, scales, x, n):
    """Reference of nf4_quantize. codes (n/2,): two elements each, the first in the higher bits.
    scales (n/64,): the largest |x| of each block."""
    blocks = x.reshape(-1, BLOCK)
    for part in row_blocks(n // BLOCK, BLOCK):
        values = compute(blocks[part])
        scales[part] = largest = np.abs(values).max(axis=1)
        scaled = values * (np.float32(1) / np.maximum(largest, LEAST))[:, None]
        found, above = np.zeros(scaled.shape, np.uint8), np.empty(scaled.shape, bool)
        for edge in EDGES:  # comparisons are ten times as fast as a search
            found += np.greater(scaled, edge, out=above)
        pairs = found.reshape(-1, 2)
        half = slice(part.start * BLOCK // 2, part.start * BLOCK // 2 + len(pairs))
        codes[half] = pairs[:, 0] << 4 | pairs[:, 1]


def _edges(levels: np.ndarray) -> np.ndarray:
    return (levels[:-1] + levels[1:]) * np.float32(0.5)


def nf4_quantize_scales(codes, groups, scales, mean, levels, count):
    """Reference of nf4_quantize_scales. codes U8 (count,): the codes of scales minus mean. groups
    F32 (ceil(count / 256),): the largest |scale - mean| of each 256 scales."""
    values = np.zeros(len(groups) * GROUP, np.float32)
    np.subtract(scales, mean[0], out=values[:count])
    values = values.reshape(-1, GROUP)
    groups[...] = np.abs(values).max(axis=1)
    values *= (np.float32(1) / np.maximum(groups, LEAST))[:, None]
    codes[...] = np.searchsorted(_edges(levels), values.reshape(-1)[:count], side="left")


def largest_scale(scales: np.ndarray, means: np.ndarray) -> np.float32:
    """Return the largest decoded scale of modules' scales (modules, blocks). Codes grow with
    scales, so that each group's largest and smallest scale are enough."""
    starts, levels = np.arange(0, scales.shape[1], GROUP), scale_levels()
    values = scales - means[:, None]
    ends = [end.reduceat(values, starts, axis=1) for end in (np.minimum, np.maximum)]
    groups = np.maximum(*np.abs(ends))
    factors = np.float32(1) / np.maximum(groups, LEAST)
    codes = np.searchsorted(_edges(levels), ends * factors, side="left")
    return np.abs(levels[codes] * groups + means[:, None]).max()


def nf4_decode(out, codes, scale_codes, groups, mean, levels, n):
    """Reference of nf4_decode: out = level of the code * scale; scale = level of its code * group +
    mean. n: elements of each module."""
    blocks = out.reshape(-1, BLOCK)
    for part, values in nf4_blocks(codes, scale_codes, groups, mean, levels, n):
        blocks[part] = values


def nf4_decode_fp8(out, scale, codes, scale_codes, groups, mean, levels, n):
    """Reference of nf4_decode_fp8: the result of nf4_decode / scale, in FP8."""
    factor = np.float32(1) / scale[0]
    blocks = out.view(np.uint8).reshape(-1, BLOCK)
    for part, values in nf4_blocks(codes, scale_codes, groups, mean, levels, n):
        encode_fp8(blocks[part], values, factor, out.dtype)


# -- MXFP4: codes of four bits (E2M1); each 32 codes share a power of two (E8M0)
#
# Source: the OCP's Microscaling Formats specification, version 1.0.

# elements
MXFP4_CASES = {"one_block": (32,), "ragged": (5 * 1024 + 96,), "gpt_oss_expert": (5760 * 2880,)}


def mxfp4_encode(codes, exponents, x, n):
    """Reference of mxfp4_encode: the smallest power of two with which no |x| / power in a block is
    above 6, and the nearest codes, ties to even. codes: U8 (n/2,), two elements each, the first in
    the lower bits. exponents: U8 (n/32,). x: (n,), finite."""
    blocks = x.reshape(-1, MXFP4_BLOCK).astype(np.float32)
    bits = np.abs(blocks).max(axis=1).view(np.uint32)
    # A largest |x| of 1.m * 2^k becomes 4 * 1.m, or 2 * 1.m if 4 * 1.m is above 6.
    exponent = (bits >> 23).astype(np.int32) - 2 + ((bits & 0x7FFFFF) > 0x400000)
    exponents[...] = np.clip(exponent, 0, 2 * MXFP4_BIAS)
    size = np.ldexp(np.abs(blocks), MXFP4_BIAS - exponents.astype(np.int32)[:, None])
    edges = (MXFP4_LEVELS[1:] + MXFP4_LEVELS[:-1]) / 2
    code = np.zeros(blocks.shape, np.uint8)
    for number, edge in enumerate(edges):
        code += size >= edge if number % 2 else size > edge
    code |= np.signbit(blocks).astype(np.uint8) << 3
    pairs = code.reshape(-1, 2)
    codes[...] = pairs[:, 0] | pairs[:, 1] << 4


def mxfp4_decode(out, codes, exponents, n):
    """Reference of mxfp4_decode: out = level * 2^(exponent - 127), exact in BF16."""
    out[...] = mxfp4_blocks(codes, exponents).reshape(out.shape)
