"""Reference of RMSNorm over heads, with SiLU of a gate multiplied after or before the norm."""

import numpy as np

from llmq.ref.common import compute, row_blocks, sigmoid, silu_slope

# name: (rows, heads, head size, columns, offset, whether the gate comes first)
CASES = {
    "one_head": (1, 1, 32, 32, 0, False),
    "ragged": (21, 3, 64, 250, 40, False),
    "head_128": (9, 2, 128, 256, 0, False),
    "gate_first": (21, 3, 64, 250, 40, True),
    "wide": (9, 2, 768, 1602, 66, True),
    "widest": (5, 1, 2560, 2562, 2, True),
    "qwen35_4b": (4096, 32, 128, 12352, 8192, False),
    "granite4_micro": (8192, 1, 4096, 8512, 4352, True),
    "nemotron3_nano": (8192, 8, 512, 10304, 6144, True),
}


def _rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return compute(x.astype(dtype, copy=False))


def gated_norm_forward(
    out, x, gate, weight, eps, rows, heads, columns, offset, *, head_dim, gate_first
):
    """out (rows, heads * head_dim) = T(T(weight * T(rstd * x)) * silu(gate)). gate_first: out =
    T(weight * rstd * y), with y = x * silu(gate) and rstd computed from y. gate: (rows, columns),
    read from column `offset` on. weight: (1, head_dim), or a row for each head."""
    width = heads * head_dim
    out, x = (a.reshape(rows, width) for a in (out, x))
    gate = gate.reshape(rows, columns)[:, offset : offset + width]
    for block in row_blocks(rows, width):
        value = compute(x[block]).reshape(-1, heads, head_dim)
        z = compute(gate[block]).reshape(value.shape)
        with np.errstate(over="ignore"):
            active = z * sigmoid(z)
        if gate_first:
            value = value * active
        rstd = 1 / np.sqrt(np.square(value).mean(-1, keepdims=True) + value.dtype.type(eps))
        if gate_first:
            result = compute(weight) * (rstd * value)
        else:
            normed = _rounded(rstd * value, x.dtype)
            result = _rounded(compute(weight) * normed, x.dtype) * active
        out[block] = result.reshape(-1, width).astype(out.dtype, copy=False)


def gated_norm_backward(
    d_x, d_gate, partial, d_out, x, gate, weight, eps, rows, heads, columns, offset, *, head_dim,
    gate_first,
):  # fmt: skip
    """Write the gradients of x and gate; rows of partial (blocks, size of weight) add up to the
    gradient of weight."""
    width = heads * head_dim
    shape = (rows, heads, head_dim)
    d_x, d_out, x = (a.reshape(shape) for a in (d_x, d_out, x))
    gate, d_gate = (
        a.reshape(rows, columns)[:, offset : offset + width].reshape(shape) for a in (gate, d_gate)
    )
    w, partial[...] = compute(weight), 0
    for block in row_blocks(rows, width):
        value, z, d_o = (compute(a[block]) for a in (x, gate, d_out))
        with np.errstate(over="ignore"):
            share = sigmoid(z)
        active, slope = z * share, silu_slope(z, share)
        normed = value * active if gate_first else value
        rstd = 1 / np.sqrt(np.square(normed).mean(-1, keepdims=True) + value.dtype.type(eps))
        x_hat = rstd * normed
        d_y = d_o if gate_first else d_o * active
        sums = (d_y * x_hat).sum(0)
        partial[0] += sums.reshape(-1) if len(w) > 1 else sums.sum(0)
        d_n = d_y * w
        d_value = rstd * (d_n - x_hat * (d_n * x_hat).mean(-1, keepdims=True))
        of_gate = d_value * value if gate_first else d_o * (w * x_hat)
        d_gate[block] = (of_gate * slope).astype(d_gate.dtype, copy=False)
        d_value = d_value * active if gate_first else d_value
        d_x[block] = d_value.astype(d_x.dtype, copy=False)
