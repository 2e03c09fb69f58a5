"""References of MXFP4: codes of four bits (E2M1), 32 of which share a power of two (E8M0).

Source: the OCP's Microscaling Formats specification, version 1.0.
"""

import numpy as np

# elements
CASES = {"one_block": (32,), "ragged": (5 * 1024 + 96,), "gpt_oss_expert": (5760 * 2880,)}

BLOCK = 32
BIAS = 127  # of a block's exponent
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Values of codes; a fourth bit is the sign."""
_SIGNED = np.concatenate([LEVELS, -LEVELS])
_PAIRS = np.stack([_SIGNED[np.arange(256) & 15], _SIGNED[np.arange(256) >> 4]], axis=1)
_PAIRS = _PAIRS.view(np.uint64)[:, 0]
"""The values of a byte's two codes, taken as one number, which is faster."""


def mxfp4_encode(codes, exponents, x, n):
    """The smallest power of two with which no value of a block is above 6, and the nearest codes,
    of two the even one. codes: U8 (n/2,), the first of two in the lower bits. exponents: U8
    (n/32,). x: (n,), finite."""
    blocks = x.reshape(-1, BLOCK).astype(np.float32)
    bits = np.abs(blocks).max(axis=1).view(np.uint32)
    # 4 * 1.m is at most 6, or half of it is.
    exponent = (bits >> 23).astype(np.int32) - 2 + ((bits & 0x7FFFFF) > 0x400000)
    exponents[...] = np.clip(exponent, 0, 2 * BIAS)
    size = np.ldexp(np.abs(blocks), BIAS - exponents.astype(np.int32)[:, None])
    edges = (LEVELS[1:] + LEVELS[:-1]) / 2
    code = np.zeros(blocks.shape, np.uint8)
    for number, edge in enumerate(edges):
        code += size >= edge if number % 2 else size > edge
    code |= np.signbit(blocks).astype(np.uint8) << 3
    pairs = code.reshape(-1, 2)
    codes[...] = pairs[:, 0] | pairs[:, 1] << 4


def mxfp4_decode(out, codes, exponents, n):
    """out = level * 2^(exponent - 127), which BF16 holds exactly."""
    values = _PAIRS[codes].view(np.float32).reshape(-1, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):  # an exponent of 255 makes no number
        values *= np.exp2(exponents.astype(np.float32) - BIAS)[:, None]
    out[...] = values.reshape(out.shape)
