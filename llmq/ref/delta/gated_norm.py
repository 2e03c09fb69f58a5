"""Reference of RMSNorm over heads, times SiLU of a gate."""

import numpy as np

from llmq.ref.common import compute, row_blocks, sigmoid, silu_slope

# name: (rows, heads, head size, columns, offset)
CASES = {
    "one_head": (1, 1, 32, 32, 0),
    "ragged": (21, 3, 64, 250, 40),
    "head_128": (9, 2, 128, 256, 0),
    "qwen35_4b": (4096, 32, 128, 12352, 8192),
}


def _rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return compute(x.astype(dtype, copy=False))


def gated_norm_forward(out, x, gate, weight, eps, rows, heads, columns, offset, *, head_dim):
    """out (rows, heads * head_dim) = T(T(weight * T(rstd * x)) * silu(gate)). gate: of (rows,
    columns), from column `offset` on."""
    width = heads * head_dim
    out, x = (a.reshape(rows, width) for a in (out, x))
    gate = gate.reshape(rows, columns)[:, offset : offset + width]
    for block in row_blocks(rows, width):
        value = compute(x[block]).reshape(-1, heads, head_dim)
        rstd = 1 / np.sqrt(np.square(value).mean(-1, keepdims=True) + value.dtype.type(eps))
        normed = _rounded(rstd * value, x.dtype)
        normed = _rounded(compute(weight) * normed, x.dtype).reshape(-1, width)
        z = compute(gate[block])
        with np.errstate(over="ignore"):
            out[block] = (normed * (z * sigmoid(z))).astype(out.dtype, copy=False)


def gated_norm_backward(
    d_x, d_gate, partial, d_out, x, gate, weight, eps, rows, heads, columns, offset, *, head_dim
):
    """The gradients of x and of the gate, and of the weight in partial (blocks, head_dim)."""
    width = heads * head_dim
    shape = (rows, heads, head_dim)
    d_x, d_out, x = (a.reshape(shape) for a in (d_x, d_out, x))
    gate, d_gate = (
        a.reshape(rows, columns)[:, offset : offset + width].reshape(shape) for a in (gate, d_gate)
    )
    w, partial[...] = compute(weight), 0
    for block in row_blocks(rows, width):
        value, z, d_o = (compute(a[block]) for a in (x, gate, d_out))
        rstd = 1 / np.sqrt(np.square(value).mean(-1, keepdims=True) + value.dtype.type(eps))
        x_hat = rstd * value
        with np.errstate(over="ignore"):
            share = sigmoid(z)
        d_y = d_o * (z * share)
        d_gate[block] = (d_o * (w * x_hat) * silu_slope(z, share)).astype(d_gate.dtype, copy=False)
        partial[0] += (d_y * x_hat).sum((0, 1))
        d_n = d_y * w
        d_value = rstd * (d_n - x_hat * (d_n * x_hat).mean(-1, keepdims=True))
        d_x[block] = d_value.astype(d_x.dtype, copy=False)
