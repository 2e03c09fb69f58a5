"""References of llmq/cu/product/skinny.cu: products of few rows."""

from itertools import pairwise

import numpy as np

from llmq.ref.common import BF16, compute, decode_fp8, mxfp4_blocks, nf4_blocks

# M, N, K
CASES = {
    "one_row": (1, 48, 64),
    "ragged": (5, 37, 104),
    "deep": (3, 16, 4600),
    "most": (16, 72, 1032),
    "qwen05b_up": (1, 9728, 896),
    "qwen05b_head": (1, 151936, 896),
    "qwen7b_qkv": (1, 4608, 3584),
    "qwen7b_up": (1, 37888, 3584),
    "qwen7b_down": (1, 3584, 18944),
    "qwen7b_up_16": (16, 37888, 3584),
}
# M, N, K, first row of codes in b and the row after the last, modules of codes
NF4_CASES = {
    "one_row": (1, 48, 64, 0, 48, 1),
    "part": (3, 64, 320, 8, 56, 2),
    "ragged": (16, 37, 1088, 0, 37, 1),
    "several_tiles": (37, 24, 192, 0, 24, 1),
    "qwen7b_up": (1, 37888, 3584, 0, 37888, 2),
    "qwen7b_down": (1, 3584, 18944, 0, 3584, 1),
    "qwen7b_up_16": (16, 37888, 3584, 0, 37888, 2),
}
# M, N, K
MXFP4_CASES = {
    "one_row": (1, 40, 96),
    "several_tiles": (19, 24, 1120),
    "gpt_oss_up": (4, 5760, 2880),
}
# M, N, K, first row of codes in b and the row after the last, rows per module, rows per scale
BYTES_CASES = {
    "of_rows": (1, 48, 64, 0, 48, 48, 1),
    "of_matrix": (19, 37, 1088, 0, 37, 37, 37),
    "of_blocks": (3, 308, 400, 8, 308, 150, 128),
    "qwen7b_up": (1, 37888, 3584, 0, 37888, 37888, 1),
    "qwen7b_down": (1, 3584, 18944, 0, 3584, 3584, 1),
    "qwen7b_up_64": (64, 37888, 3584, 0, 37888, 37888, 1),
}


def skinny(out, a, b, bias, addend, M, N, K, alpha):
    """out (M, N) = alpha * a (M, K) @ b (N, K)^T [+ bias (N,)] [+ addend (M, N)], summed in F32."""
    total = compute(a) @ compute(b).T
    total *= np.float32(alpha)
    for added in (bias, addend):
        if added is not None:
            total += compute(added)
    out[...] = total


def skinny_nf4(
    out, a, codes, scale_codes, groups, mean, levels, bias, addend, starts, M, N, K, E, first, rows,
    modules, alpha,
):  # fmt: skip
    """Columns first + [0, rows) of `skinny`'s out, whose rows of b are NF4 codes, decoded to BF16.
    codes (E rows K / 2,), scale_codes (E rows K / 64,), groups, mean (modules,), levels (256,): as
    in nf4_decode. starts: I32 (E + 1,): matrix e, with its bias, multiplies rows [starts[e],
    starts[e + 1]) of a; None: there is one matrix."""
    b = np.empty((E * rows * K // 64, 64), BF16)
    sizes = E * rows * K // modules
    for part, values in nf4_blocks(codes, scale_codes, groups, mean, levels, sizes):
        b[part] = values
    sizes = (M, N, K, first, rows)
    _multiply_each(out, a, b.reshape(E, rows, K), bias, addend, starts, sizes, alpha)


def skinny_mxfp4(out, a, codes, exponents, bias, addend, starts, M, N, K, E, alpha):
    """`skinny` with MXFP4 codes (E N K / 2,) and exponents (E N K / 32,) for b. starts: as in
    skinny_nf4."""
    b = mxfp4_blocks(codes, exponents).reshape(E, N, K)
    _multiply_each(out, a, b, bias, addend, starts, (M, N, K, 0, N), alpha)


def skinny_bytes(
    out, a, codes, scales, bias, addend, starts, M, N, K, E, first, rows, of_module, of_scale,
    columns, alpha,
):  # fmt: skip
    """`skinny_nf4` with codes (E rows K,), E4M3 or I8, times scales. A scale is for of_scale rows
    of a module and all K columns (columns = 1), or 128 columns."""
    codes = codes.reshape(E * rows, K)
    values = codes.astype(np.float32) if codes.dtype == np.int8 else decode_fp8(codes)
    factors = scales.reshape(E * rows // of_module, -1, columns)
    factors = np.repeat(factors, of_scale, axis=1)[:, :of_module].reshape(E, rows, columns)
    factors = np.repeat(factors, K if columns == 1 else 128, axis=2)[..., :K]
    b = values.reshape(E, rows, K) * factors
    _multiply_each(out, a, b, bias, addend, starts, (M, N, K, first, rows), alpha)


def _multiply_each(out, a, b, bias, addend, starts, sizes, alpha):
    """Write columns first + [0, rows) of out, for each matrix b[e] (rows, K) the rows that starts
    gives. sizes: M, N, K, first, rows."""
    M, N, K, first, rows = sizes
    own = slice(first, first + rows)
    for e, (begin, end) in enumerate(pairwise([0, M] if starts is None else starts)):
        its = slice(begin, end)
        added = [None if bias is None else bias.reshape(len(b), N)[e, own]]
        added.append(None if addend is None else addend[its, own])
        skinny(out[its, own], a[its], b[e], *added, end - begin, rows, K, alpha)
