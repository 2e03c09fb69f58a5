"""Reference of the down product's input gradient with the activation's behind it: one by one."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import BF16
from llmq.ref.matmul_adapted import matmul_adapted
from llmq.ref.swiglu import swiglu_backward_fp8

# name: (M, F, K, R)
CASES = {
    "small": (16, 64, 64, 0),
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
    *fp8: np.ndarray | None,
    gelu: int = 0,
) -> None:
    """d_out (M,F) = scale_a * scale_b * (a (M,K) @ b) [+ h (M,R) @ tail (R,F)], rounded to BF16;
    then swiglu_backward_fp8 of that.

    b: (K,F), of fp8 codes (F,K). fp8: codes, transposed, scale, saturated, then out,
    out_transposed, out_scale, out_saturated.
    """
    d_out = np.empty((M, F), BF16)
    matmul_adapted(d_out, a, b, h, tail, scale_a, scale_b, M, F, K, transposed=1)
    swiglu_backward_fp8(d_up_gate, d_out, up_gate, M, F, abs_max, *fp8, gelu=gelu)
