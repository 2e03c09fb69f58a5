"""Reference of the matrix product: NumPy's BLAS."""

import threading

import numpy as np

from llmq.base.products import product
from llmq.ref.common import (
    add_terms,
    compute,
    decode_fp8,
    encode_fp8,
    row_blocks,
    update_abs_max,
)

# name: (M, N, K, trans_a, trans_b). Linear layers: forward x @ W^T, d_x = d_out @ W,
# d_W = d_out^T @ x.
CASES = {
    "plain": (24, 40, 56, False, False),
    "trans_a": (40, 24, 16, True, False),
    "trans_b": (8, 136, 64, False, True),
    "trans_both": (16, 8, 24, True, True),
    "tall": (600, 8, 16, False, True),
    "qwen05b_up_forward": (32768, 9728, 896, False, True),
    "qwen05b_up_d_input": (32768, 896, 9728, False, False),
    "qwen05b_up_d_weight": (9728, 896, 32768, True, False),
    "qwen05b_head": (8192, 151936, 896, False, True),
    "qwen15b_qkv_forward": (32768, 2048, 1536, False, True),
    "qwen15b_down_d_weight": (1536, 8960, 32768, True, False),
}
# name: (M, N, K), out = a (M,K) @ b (N,K)^T. Forward x @ W^T, d_x = d_out @ (W^T)^T,
# d_W = d_out^T @ (x^T)^T: FP8 codes exist in the layout that each product needs.
FP8_CASES = {
    "small": (16, 16, 32),
    "wide": (48, 144, 64),
    "deep": (32, 16, 512),
    "tall": (608, 32, 16),
    "rows_of_no_16": (20, 32, 48),
    "qwen05b_up_forward": (32768, 9728, 896),
    "qwen05b_up_d_input": (32768, 896, 9728),
    "qwen05b_up_d_weight": (9728, 896, 32768),
    "qwen15b_qkv_forward": (32768, 2048, 1536),
    "qwen15b_down_d_weight": (1536, 8960, 32768),
}

# Elements of the buffer that holds a product before the addition: 4 MiB, which stay in the cache,
# and enough rows for the BLAS to run at full speed.
CHUNK = 1 << 20
_local = threading.local()


def _buffer(size: int, dtype: np.dtype) -> np.ndarray:
    """This thread's buffer: the page faults of a new buffer in each call would cost more time than
    the addition."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None or buffer.size < size or buffer.dtype != dtype:
        buffer = _local.buffer = np.empty(max(size, CHUNK), dtype)
    return buffer


def matmul(
    out, a, b, bias, addend, workspace, M, N, K, trans_a, trans_b, accumulate, alpha=1.0, beta=1.0,
    batch=1,
):  # fmt: skip
    """out (M,N) = alpha * op(a) @ op(b) [+ bias (N,)] [+ beta * addend (M,N)], summed in F32,
    rounded to out once. a is (M,K), or (K,M) if trans_a; b is (K,N), or (N,K) if trans_b. With
    accumulate out is the addend. 3-dimensional tensors hold a batch of products."""
    if out.ndim == 3:
        sizes = (M, N, K, trans_a, trans_b, accumulate, alpha, beta)
        for i in range(batch):
            matmul(
                out[i], a[i], b[i], bias, addend if addend is None else addend[i], workspace, *sizes
            )
        return
    left = compute(a.T if trans_a else a)
    right = compute(b.T if trans_b else b)
    if out.dtype != left.dtype or alpha != 1 or beta != 1:
        total = product(left, right)
        total *= left.dtype.type(alpha)
        if bias is not None:
            total += compute(bias)
        added = out if accumulate else addend
        if added is not None:
            total += compute(added) * left.dtype.type(beta)
        out[...] = total
        return
    if not accumulate:
        product(left, right, out)
    else:
        rows = max(CHUNK // N, 256)
        for start in range(0, M, rows):
            stop = min(start + rows, M)
            part = _buffer((stop - start) * N, out.dtype)[: (stop - start) * N]
            part = product(left[start:stop], right, part.reshape(stop - start, N))
            out[start:stop] += part
    if bias is not None:
        out += bias
    _add(out, addend)


def _add(total: np.ndarray, addend: np.ndarray | None) -> None:
    """total += addend, whose dtype may have fewer bits."""
    if addend is None:
        return
    for rows in row_blocks(*total.shape):
        total[rows] += compute(addend[rows])


def matmul_fp8(
    out, a, b, scale_a, scale_b, bias, factor, largest, addend, workspace, M, N, K, accumulate,
    fast_accumulation, alpha=1.0,
):  # fmt: skip
    """out (M,N) = alpha * scale_a * scale_b * (a (M,K) @ b (N,K)^T) [+ bias (N,)] [+ addend (M,N)].
    Products of codes are exact in F32 and summed in F32, whatever fast_accumulation is; the rest is
    computed in F32 and rounded to out once. With accumulate out is the addend. With a factor, out
    gets FP8 codes of the result times the factor, and largest[0] the largest |result|."""
    right = decode_fp8(b).T
    scale = scale_a[0] * scale_b[0] * np.float32(alpha)
    step = max(CHUNK // N, 256)
    if largest is not None:
        largest[0] = 0
    for start in range(0, M, step):
        rows = slice(start, min(start + step, M))
        left = decode_fp8(a[rows])
        in_place = out.dtype == left.dtype and not accumulate
        if in_place:
            total = out[rows]
        else:
            total = _buffer(len(left) * N, left.dtype)[: len(left) * N].reshape(-1, N)
        np.matmul(left, right, out=total)
        total *= scale
        add_terms(total, rows, bias, out if accumulate else addend)
        if factor is not None:
            update_abs_max(largest, total)
            encode_fp8(out.view(np.uint8)[rows], total, factor[0], out.dtype)
        elif not in_place:
            out[rows] = total


def block_scales(scales, scalars, scale_a, scale_b, alpha, beta, n):
    """scales: bytes 127, each the scale 1 of 32 codes. scalars F32: scalars[0] = scale_a * scale_b
    * alpha, scalars[4] = beta; the other elements stay."""
    scales[...] = 127
    scalars[0], scalars[4] = scale_a[0] * scale_b[0] * np.float32(alpha), beta


def matmul_mxfp8(
    out, a, b, scales, scalars, bias, addend, workspace, M, N, K, accumulate, fast_accumulation
):
    """matmul_fp8 with scalars[0] as the product of the scales. The block scales are 1 and not
    read."""
    one, sizes = np.ones(1, np.float32), (M, N, K, accumulate, fast_accumulation)
    matmul_fp8(out, a, b, scalars[:1], one, bias, None, None, addend, workspace, *sizes)


# -- The product of int8 codes: NumPy's BLAS, in pieces whose sums F32 holds exactly

# name: (M, N, K), out = a (M,K) @ b (N,K)^T. Forward x @ W^T, d_x = d_out @ (W^T)^T,
# d_W = d_out^T @ (x^T)^T: int8 codes exist in the layout that each product needs.
INT8_CASES = {
    "small": (16, 16, 32),
    "odd_k": (32, 48, 80),
    "wide": (48, 144, 64),
    "deep": (32, 16, 1104),
    "tall": (608, 32, 16),
    "rows_of_no_16": (20, 32, 48),
    "qwen05b_up_forward": (32768, 9728, 896),
    "qwen05b_up_d_input": (32768, 896, 9728),
    "qwen05b_up_d_weight": (9728, 896, 32768),
    "qwen15b_qkv_forward": (32768, 2048, 1536),
    "qwen15b_up_forward": (32768, 17920, 1536),
    "qwen15b_down_d_weight": (1536, 8960, 32768),
}

EXACT = 1024  # products of two codes, at most 127 * 127 each, whose sum is below 2^24
ROWS = 1024  # rows of a at a time


def matmul_int8(out, a, b, scale_a, scale_b, bias, M, N, K, alpha, *, accumulate):
    """out (M,N) = (a (M,K) @ b (N,K)^T * (scale_a * alpha)) * scale_b [+ bias (N,)] [+ out]. The
    sums are exact; the rest is computed in F32 and rounded to out once."""
    right = b.astype(np.float32).T
    for start in range(0, M, ROWS):
        rows = slice(start, start + ROWS)
        left = a[rows].astype(np.float32)
        total = left[:, :EXACT] @ right[:EXACT]
        if K > EXACT:
            total = total.astype(np.int32)
            for k in range(EXACT, K, EXACT):
                total += (left[:, k : k + EXACT] @ right[k : k + EXACT]).astype(np.int32)
            total = total.astype(np.float32)
        total *= scale_a[rows, None] * np.float32(alpha)
        total *= scale_b
        add_terms(total, rows, bias, out if accumulate else None)
        out[rows] = total
