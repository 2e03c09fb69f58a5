"""References of fused products: NumPy's BLAS, and each epilogue's formula.

The operands are a (M,K), b (N,K) or with b_k_outside (K,N), h (M,R), tail (N,R) or with
tail_k_outside (R,N). Every product computes

    x = alpha * scale_a * scale_b * (a @ b^T) + h @ tail^T

in F32, a few rows at a time, and rounds once.
"""

from collections.abc import Iterator

import numpy as np

from llmq.ref.common import (
    BF16,
    add_terms,
    compute,
    decode_fp8,
    store_gradient,
    swiglu_backward_fp8,
    swiglu_forward_fp8,
)

PRODUCT_ROWS = 1024  # rows that _adapted_product computes at a time

# Sizes and options of cases in tests and tools/bench_ops, by kernel and name.
CASES = {
    # M, N, K, R, transposed. Forward x @ W^T + h @ B^T, d_x = d_out @ W + d_h @ A.
    "matmul_adapted": {
        "small": (16, 64, 64, 104, False),
        "small_transposed": (16, 64, 64, 104, True),
        "tiles": (304, 208, 400, 104, False),
        "tiles_transposed": (304, 208, 400, 104, True),
        "qwen7b_up_forward": (4096, 37888, 3584, 32, False),
        "qwen7b_down_d_input": (4096, 18944, 3584, 16, True),
    },
    # M, N, K, experts, transposed
    "matmul_grouped": {
        "small": (16, 64, 64, 1, False),
        "tiles": (700, 208, 80, 7, False),
        "tiles_transposed": (700, 208, 128, 7, True),
        "qwen30b_up": (131072, 1536, 2048, 128, False),
        "qwen30b_down_d_input": (131072, 768, 2048, 128, True),
    },
    # rows, M, N, experts
    "matmul_grouped_gradient": {
        "small": (16, 64, 64, 1),
        "tiles": (700, 208, 296, 7),
        "qwen30b_up": (131072, 1536, 2048, 128),
        "qwen30b_down": (131072, 2048, 768, 128),
    },
    # M, N, K of d_W = d_out^T @ x
    "matmul_gradient": {
        "small": (16, 64, 64),
        "tiles": (304, 336, 528),  # edges of tiles, and a last part of less than a step
        "qwen05b_up": (9728, 896, 32768),
        "qwen15b_qkv": (2048, 1536, 32768),
        "qwen15b_up": (17920, 1536, 32768),
        "qwen15b_down": (1536, 8960, 32768),
        "qwen7b_down": (3584, 18944, 16384),
    },
    # M, F, K, R
    "matmul_swiglu": {
        "small": (16, 48, 64, 0),
        "tiles": (304, 208, 80, 40),  # multiplied faster than the activation is computed
        "qwen05b": (32768, 4864, 896, 0),
        "qwen15b": (32768, 8960, 1536, 0),
        "qwen7b_lora": (4096, 18944, 3584, 32),
    },
    # M, F, K, R
    "matmul_swiglu_backward": {
        "small": (16, 64, 64, 0),
        "whole": (144, 192, 64, 0),
        "tiles": (304, 320, 400, 40),
        "qwen05b": (32768, 4864, 896, 0),
        "qwen15b": (32768, 8960, 1536, 0),
        "qwen7b_lora": (4096, 18944, 3584, 16),
    },
}

Array = np.ndarray | None  # None: an input that is not given, or a result that is not wanted


def _adapted_product(
    a: np.ndarray,
    right: np.ndarray,
    h: np.ndarray | None,
    low: np.ndarray | None,
    scale_a: np.ndarray | None,
    scale_b: np.ndarray | None,
    alpha: float,
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield slices of rows and alpha * scale_a * scale_b * (a @ right) [+ h @ low] of these rows,
    not rounded. right (K,N), low (R,N): in the precision that references compute in. a: FP8 codes
    if there are scales."""
    for start in range(0, len(a), PRODUCT_ROWS):
        rows = slice(start, start + PRODUCT_ROWS)
        total = (compute(a[rows]) if scale_a is None else decode_fp8(a[rows])) @ right
        scale = 1 if scale_a is None else scale_a[0] * scale_b[0]
        if scale_a is not None or alpha != 1:
            total *= scale * total.dtype.type(alpha)
        if low is not None:
            total += compute(h[rows]) @ low
        yield rows, total


def _sums(
    a: Array, b: Array, h: Array, tail: Array, scale_a: Array, scale_b: Array,
    alpha: float, b_k_outside: int = 0, tail_k_outside: int = 0,
) -> Iterator[tuple[slice, np.ndarray]]:  # fmt: skip
    """Yield slices of rows and x of these rows."""
    right = compute(b) if scale_a is None else decode_fp8(b)
    low = None if tail is None else compute(tail if tail_k_outside else tail.T)
    return _adapted_product(a, right if b_k_outside else right.T, h, low, scale_a, scale_b, alpha)


def matmul_adapted(
    a: Array, b: Array, h: Array, tail: Array, scale_a: Array, scale_b: Array,
    M: int, N: int, K: int, alpha: float, out: np.ndarray, bias: Array = None, addend: Array = None,
    *, b_k_outside: int = 0, tail_k_outside: int = 0,
) -> None:  # fmt: skip
    """out (M,N) = x [+ bias (N)] [+ addend (M,N)]."""
    operands = (a, b, h, tail, scale_a, scale_b)
    for rows, total in _sums(*operands, alpha, b_k_outside, tail_k_outside):
        add_terms(total, rows, bias, addend)
        out[rows] = total


def matmul_grouped(
    a: Array, b: Array, h: Array, tail: Array, scale_a: Array, scale_b: Array,
    M: int, N: int, K: int, alpha: float,
    out: np.ndarray, bias: Array, starts: np.ndarray, experts: int,
    *, b_k_outside: int = 0, tail_k_outside: int = 0,
) -> None:  # fmt: skip
    """out (M,N) = x [+ bias[e] (N)]; rows [starts[e], starts[e + 1]) take b[e] and tail[e]."""
    matrices = b.reshape(experts, *((K, N) if b_k_outside else (N, K)))
    tails = None if tail is None else tail.reshape(experts, -1, tail.shape[1])
    for e in np.flatnonzero(np.diff(starts)):
        rows = slice(starts[e], starts[e + 1])
        sizes = rows.stop - rows.start, N, K, alpha
        low = (None, None) if tail is None else (h[rows], tails[e])
        operands = (a[rows], matrices[e], *low, scale_a, scale_b)
        of_expert = None if bias is None else bias[e]
        matmul_adapted(
            *operands, *sizes, out[rows], of_expert,
            b_k_outside=b_k_outside, tail_k_outside=tail_k_outside,
        )  # fmt: skip


def matmul_grouped_gradient(
    a: Array, b: Array, h: Array, tail: Array, scale_a: Array, scale_b: Array,
    M: int, N: int, K: int, alpha: float,
    d: np.ndarray, scalars: np.ndarray, accumulate: int, salt: int,
    starts: np.ndarray, experts: int,
) -> None:  # fmt: skip
    """d[e] (M,N) = or += a^T @ b over rows [starts[e], starts[e + 1]) of a (K,M) and b (K,N)."""
    for e in range(experts):
        rows = slice(starts[e], starts[e + 1])
        product = (compute(a[rows]).T @ compute(b[rows])).astype(BF16)
        if rows.stop > rows.start or not accumulate:
            store_gradient(d[e], product, scalars, bool(accumulate), salt, first=e * M * N)


def matmul_gradient(
    a: Array, b: Array, h: Array, tail: Array, scale_a: Array, scale_b: Array,
    M: int, N: int, K: int, alpha: float,
    d: np.ndarray, scalars: np.ndarray, accumulate: int, salt: int,
    part_steps: int,
) -> None:  # fmt: skip
    """d (M,N) = or += x, rounded to BF16.

    The sum with d is rounded stochastically. part_steps: the kernel's division of sums, not used
    here.
    """
    product = np.empty((M, N), BF16)
    matmul_adapted(a, b, h, tail, scale_a, scale_b, M, N, K, alpha, product)
    store_gradient(d, product, scalars, bool(accumulate), salt)


def matmul_swiglu(
    a: Array, b: Array, h: Array, tail: Array, scale_a: Array, scale_b: Array,
    M: int, N: int, K: int, alpha: float,
    up_gate: Array, out: Array, abs_max: Array = None, codes: Array = None,
    transposed: Array = None, scale: Array = None, saturated: Array = None, *, gelu: int = 0,
) -> None:  # fmt: skip
    """up_gate (M,2N) = x with b (2N,K), rounded to BF16; out (M,N) = up * gate * sigmoid(gate), and
    the FP8 codes of out."""
    up_gate = np.empty((M, 2 * N), BF16) if up_gate is None else up_gate
    matmul_adapted(a, b, h, tail, scale_a, scale_b, M, N, K, alpha, up_gate)
    results = abs_max, codes, transposed, scale, saturated
    swiglu_forward_fp8(out, up_gate, M, N, *results, *[None] * 4, gelu=gelu)


def matmul_swiglu_backward(
    a: Array, b: Array, h: Array, tail: Array, scale_a: Array, scale_b: Array,
    M: int, N: int, K: int, alpha: float, d_up_gate: Array, up_gate: np.ndarray, abs_max: Array,
    codes: Array, transposed: Array, scale: Array, saturated: Array,
    out: Array, out_transposed: Array, out_scale: Array, out_saturated: Array,
    *, gelu: int = 0, b_k_outside: int = 0, tail_k_outside: int = 0,
) -> None:  # fmt: skip
    """Write the gradients of up and gate (M,2N), and forward's out or its FP8 codes. d_out (M,N) is
    x, rounded to BF16."""
    d = np.empty((M, N), BF16)
    matmul_adapted(
        a, b, h, tail, scale_a, scale_b, M, N, K, alpha, d,
        b_k_outside=b_k_outside, tail_k_outside=tail_k_outside,
    )  # fmt: skip
    again = out, out_transposed, out_scale, out_saturated
    results = abs_max, codes, transposed, scale, saturated
    swiglu_backward_fp8(d_up_gate, d, up_gate, M, M, N, *results, *again, *[None] * 5, gelu=gelu)
