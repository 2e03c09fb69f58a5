"""Reference of the product with adapters in it: NumPy's BLAS."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import adapted_product, compute, decode_fp8

# name: (M, N, K, R, transposed). Forward x @ W^T + h @ B^T, d_x = d_out @ W + d_h @ A.
CASES = {
    "small": (16, 64, 64, 104, False),
    "small_transposed": (16, 64, 64, 104, True),
    "tiles": (304, 208, 400, 104, False),
    "tiles_transposed": (304, 208, 400, 104, True),
    "qwen7b_up_forward": (4096, 37888, 3584, 32, False),
    "qwen7b_down_d_input": (4096, 18944, 3584, 16, True),
}


def matmul_adapted(
    out: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    h: np.ndarray | None,
    tail: np.ndarray | None,
    scale_a: np.ndarray | None,
    scale_b: np.ndarray | None,
    bias: np.ndarray | None,
    addend: np.ndarray | None,
    M: int,
    N: int,
    K: int,
    *,
    transposed: int,
) -> None:
    """out (M,N) = scale_a * scale_b * (a (M,K) @ b (N,K)^T) [+ h (M,R) @ tail (N,R)^T] [+ bias (N)]
    [+ addend (M,N)].

    transposed: tail is (R,N), and so is b (K,N), but not fp8 codes. Computed in F32 and rounded to
    out once.
    """
    fp8 = scale_a is not None
    right = decode_fp8(b) if fp8 else compute(b)
    if fp8 or not transposed:
        right = right.T
    low = None if tail is None else compute(tail if transposed else tail.T)
    for rows, total in adapted_product(a, right, h, low, scale_a, scale_b):
        if bias is not None:
            total += compute(bias)
        if addend is not None:
            total += compute(addend[rows])
        out[rows] = total
