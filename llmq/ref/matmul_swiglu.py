"""Reference of the up product with the activation behind it: NumPy's BLAS, and swiglu's formula."""

from __future__ import annotations

import numpy as np

from llmq.base.dtypes import E4M3
from llmq.ref.common import (
    BF16,
    adapted_product,
    compute,
    decode_fp8,
    decoded,
    emit_fp8,
    encode_fp8,
    gelu_share,
    look_at_codes,
    sigmoid,
    update_abs_max,
)

# name: (M, F, K, R)
CASES = {
    "small": (16, 48, 64, 0),
    "tiles": (304, 208, 80, 40),  # multiplied faster than the activation is computed
    "qwen05b": (32768, 4864, 896, 0),
    "qwen15b": (32768, 8960, 1536, 0),
    "qwen7b_lora": (4096, 18944, 3584, 32),
}


def matmul_swiglu(
    up_gate: np.ndarray | None,
    out: np.ndarray | None,
    a: np.ndarray,
    b: np.ndarray,
    h: np.ndarray | None,
    tail: np.ndarray | None,
    scale_a: np.ndarray | None,
    scale_b: np.ndarray | None,
    M: int,
    F: int,
    K: int,
    abs_max: np.ndarray | None = None,
    codes: np.ndarray | None = None,
    transposed: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    saturated: np.ndarray | None = None,
    up_scale: np.ndarray | None = None,
    up_factor: np.ndarray | None = None,
    up_largest: np.ndarray | None = None,
    up_found: np.ndarray | None = None,
    up_abs_max: np.ndarray | None = None,
    up_saturated: np.ndarray | None = None,
    *,
    gelu: int = 0,
) -> None:
    """up_gate (M,2F) = scale_a * scale_b * (a (M,K) @ b (2F,K)^T) [+ h (M,R) @ tail (2F,R)^T];
    out (M,F) = up * gate * sigmoid(gate), and its codes.

    Each sum is computed in F32 and rounded to BF16 once; the activation is computed of that. With
    up_scale it is rounded to E4M3 codes instead, as matmul_fp8 does it, and swiglu_forward_fp8 does
    the rest; up_found is what only kernels need.
    """
    right = (compute(b) if scale_a is None else decode_fp8(b)).T
    low = None if tail is None else compute(tail).T
    if out is None:
        out = np.empty((M, F), BF16)
    if up_scale is not None:
        up_gate = np.empty((M, 2 * F), E4M3.numpy) if up_gate is None else up_gate
        up_largest[0] = 0
    for rows, total in adapted_product(a, right, h, low, scale_a, scale_b):
        if up_scale is None:
            rounded = total.astype(BF16)
            if up_gate is not None:
                up_gate[rows] = rounded
        else:
            update_abs_max(up_largest, total)
            encode_fp8(up_gate.view(np.uint8)[rows], total, up_factor[0], up_gate.dtype)
            rounded = decoded(up_gate[rows], up_scale)
        up, gate = compute(rounded[:, :F]), compute(rounded[:, F:])
        with np.errstate(over="ignore"):
            value = (gelu_share if gelu else sigmoid)(gate)
        value *= gate
        value *= up
        out[rows] = value
    if up_scale is not None:
        look_at_codes(up_gate, up_scale, up_largest, up_abs_max, up_saturated)
    update_abs_max(abs_max, out)
    emit_fp8(codes, transposed, scale, saturated, out)
