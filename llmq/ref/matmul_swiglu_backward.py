"""Reference of the down product's input gradient with the activation's behind it: NumPy's BLAS, and
swiglu's formula."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import (
    BF16,
    adapted_product,
    compute,
    decode_fp8,
    emit_fp8,
    gelu_share,
    gelu_slope,
    sigmoid,
    silu_slope,
    update_abs_max,
)

# name: (M, F, K, R)
CASES = {
    "small": (16, 64, 64, 0),
    "whole": (144, 192, 64, 0),
    "tiles": (304, 320, 400, 40),
    "qwen05b": (32768, 4864, 896, 0),
    "qwen15b": (32768, 8960, 1536, 0),
    "qwen7b_lora": (4096, 18944, 3584, 16),
}


def matmul_swiglu_backward(
    d_up_gate: np.ndarray | None,
    a: np.ndarray,
    b: np.ndarray,
    h: np.ndarray | None,
    tail: np.ndarray | None,
    scale_a: np.ndarray | None,
    scale_b: np.ndarray | None,
    up_gate: np.ndarray,
    M: int,
    F: int,
    K: int,
    abs_max: np.ndarray | None,
    codes: np.ndarray | None,
    transposed: np.ndarray | None,
    scale: np.ndarray | None,
    saturated: np.ndarray | None,
    out: np.ndarray | None,
    *,
    gelu: int = 0,
) -> None:
    """d_out (M,F) = scale_a * scale_b * (a (M,K) @ b (K,F)) [+ h (M,R) @ tail (R,F)], rounded to
    BF16; of that and up_gate (M,2F) the gradients of up and gate, and forward's out.

    b: of fp8 codes (F,K).
    """
    right = compute(b) if scale_a is None else decode_fp8(b).T
    low = None if tail is None else compute(tail)
    if d_up_gate is None:
        d_up_gate = np.empty((M, 2 * F), BF16)
    for rows, total in adapted_product(a, right, h, low, scale_a, scale_b):
        d = compute(total.astype(BF16))
        up, gate = compute(up_gate[rows, :F]), compute(up_gate[rows, F:])
        with np.errstate(over="ignore"):
            s = (gelu_share if gelu else sigmoid)(gate)
            slope = (gelu_slope if gelu else silu_slope)(gate, s)
            active = gate * s
            if out is not None:
                out[rows] = active * up
            d_up_gate[rows, :F] = active * d
            d_up_gate[rows, F:] = slope * up * d
    update_abs_max(abs_max, d_up_gate)
    emit_fp8(codes, transposed, scale, saturated, d_up_gate)
