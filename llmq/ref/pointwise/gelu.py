"""References of cu/pointwise/gelu.cu: GELU with the tanh approximation, or with relu2 the square of
ReLU, and their gradients."""

import numpy as np

from llmq.ref.common import compute, emit_fp8, gelu_share, gelu_slope, row_blocks, update_abs_max

# shape of x
CASES = {
    "one_vector": (8,),
    "ragged_block": (3, 1016),
    "one_tile": (128, 64),
    "ragged_tiles": (2, 72, 80),
    "rows_of_no_16": (2, 74, 80),
    "gpt2": (32 * 1024, 3072),
    "gpt2_xl": (8 * 1024, 6400),
}


def gelu_forward(out, x, n, abs_max=None, *, relu2=0):
    out, x = out.reshape(-1), x.reshape(-1)
    with np.errstate(over="ignore"):
        for block in row_blocks(n, 1):
            xs = compute(x[block])
            share = np.maximum(xs, 0) if relu2 else gelu_share(xs)
            np.multiply(share, xs, out=out[block], casting="same_kind")
            update_abs_max(abs_max, out[block])


def gelu_backward(d_x, d_out, x, n, abs_max=None, out=None, *, relu2=0):
    """out: forward's result again, or None; out may be x or d_out."""
    d_x, d_out, x = d_x.reshape(-1), d_out.reshape(-1), x.reshape(-1)
    with np.errstate(over="ignore"):
        for block in row_blocks(n, 1):
            xs = compute(x[block])
            s = np.maximum(xs, 0) if relu2 else gelu_share(xs)
            slope = 2 * s if relu2 else gelu_slope(xs, s)
            slope *= compute(d_out[block])
            if out is not None:
                s *= xs
                out.reshape(-1)[block] = s
            d_x[block] = slope
            update_abs_max(abs_max, d_x[block])


def gelu_forward_fp8(out, x, rows, columns, abs_max, *fp8, relu2=0):
    """gelu_forward, and the result in FP8. fp8: codes, transposed, scale, saturated."""
    if out is None:
        out = np.empty_like(x)
    gelu_forward(out, x, x.size, abs_max, relu2=relu2)
    emit_fp8(*fp8, out.reshape(rows, columns))


def gelu_backward_fp8(d_x, d_out, x, rows, columns, abs_max, *fp8, relu2=0):
    """gelu_backward, and the results in FP8. fp8: codes, transposed, scale, saturated, then out,
    out_transposed, out_scale, out_saturated."""
    *codes, out, out_transposed, out_scale, out_saturated = fp8
    if d_x is None:
        d_x = np.empty_like(x)
    if out_transposed is not None:
        out = np.empty_like(x)
    gelu_backward(d_x, d_out, x, x.size, abs_max, out, relu2=relu2)
    emit_fp8(*codes, d_x.reshape(rows, columns))
    if out_transposed is not None:
        emit_fp8(None, out_transposed, out_scale, out_saturated, out.reshape(rows, columns))
