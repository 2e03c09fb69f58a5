"""References of cu/swiglu.cu: out = up * silu(gate), and its gradient; with gelu of gelu(gate)."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import (
    compute,
    emit_fp8,
    gelu_share,
    gelu_slope,
    row_blocks,
    sigmoid,
    silu_slope,
    update_abs_max,
)

# rows, F
CASES = {
    "one_vector": (1, 8),
    "ragged_block": (5, 24),
    "several_blocks": (37, 344),
    "one_tile": (128, 64),
    "ragged_tiles": (144, 80),
    "qwen05b": (32 * 1024, 4864),
    "qwen15b": (32 * 1024, 8960),
}


def swiglu_forward(
    out: np.ndarray,
    up_gate: np.ndarray,
    rows: int,
    F: int,
    abs_max: np.ndarray | None = None,
    *,
    gelu: int = 0,
) -> None:
    out, up_gate = out.reshape(rows, F), up_gate.reshape(rows, 2 * F)
    with np.errstate(over="ignore"):
        for block in row_blocks(rows, F):
            up, gate = compute(up_gate[block, :F]), compute(up_gate[block, F:])
            value = (gelu_share if gelu else sigmoid)(gate)
            value *= gate
            np.multiply(value, up, out=out[block], casting="same_kind")
            update_abs_max(abs_max, out[block])


def swiglu_backward(
    d_up_gate: np.ndarray,
    d_out: np.ndarray,
    up_gate: np.ndarray,
    rows: int,
    F: int,
    abs_max: np.ndarray | None = None,
    out: np.ndarray | None = None,
    *,
    gelu: int = 0,
) -> None:
    """out: forward's result again; may be d_out."""
    d_out = d_out.reshape(rows, F)
    up_gate, d_up_gate = up_gate.reshape(rows, 2 * F), d_up_gate.reshape(rows, 2 * F)
    with np.errstate(over="ignore"):
        for block in row_blocks(rows, F):
            up, gate = compute(up_gate[block, :F]), compute(up_gate[block, F:])
            d = compute(d_out[block])
            s = (gelu_share if gelu else sigmoid)(gate)
            slope = (gelu_slope if gelu else silu_slope)(gate, s)
            slope *= up
            slope *= d
            active = np.multiply(gate, s, out=s)
            again = None if out is None else active * up
            active *= d
            if out is not None:  # last of all that needs d, which it may overwrite
                out.reshape(rows, F)[block] = again
            d_up_gate[block, :F] = active
            d_up_gate[block, F:] = slope
            update_abs_max(abs_max, d_up_gate[block])


def swiglu_forward_fp8(
    out: np.ndarray | None,
    up_gate: np.ndarray,
    rows: int,
    F: int,
    abs_max: np.ndarray | None,
    *fp8: np.ndarray | None,
    gelu: int = 0,
) -> None:
    """swiglu_forward, and the result in FP8. fp8: codes, transposed, scale, saturated."""
    if out is None:
        out = np.empty((rows, F), up_gate.dtype)
    swiglu_forward(out, up_gate, rows, F, abs_max, gelu=gelu)
    emit_fp8(*fp8, out.reshape(rows, F))


def swiglu_backward_fp8(
    d_up_gate: np.ndarray | None,
    d_out: np.ndarray,
    up_gate: np.ndarray,
    rows: int,
    F: int,
    abs_max: np.ndarray | None,
    *fp8: np.ndarray | None,
    gelu: int = 0,
) -> None:
    """swiglu_backward, and the results in FP8.

    fp8: codes, transposed, scale, saturated, then out, out_transposed, out_scale, out_saturated.
    """
    *codes, out, out_transposed, out_scale, out_saturated = fp8
    if d_up_gate is None:
        d_up_gate = np.empty_like(up_gate)
    if out_transposed is not None:
        out = np.empty_like(d_out)
    swiglu_backward(d_up_gate, d_out, up_gate, rows, F, abs_max, out, gelu=gelu)
    emit_fp8(*codes, d_up_gate.reshape(rows, 2 * F))
    if out_transposed is not None:
        emit_fp8(None, out_transposed, out_scale, out_saturated, out.reshape(rows, F))
