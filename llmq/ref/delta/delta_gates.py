"""Reference of the gates of a gated delta net: decays and betas of every token and value head."""

import numpy as np

from llmq.ref.common import compute, sigmoid

ROWS = 32  # of one partial sum

# name: (rows, heads, columns, offset)
CASES = {
    "one_head": (1, 1, 2, 0),
    "ragged": (300, 5, 24, 9),
    "two_warps_of_heads": (20, 40, 96, 16),
    "qwen35_4b": (4096, 32, 12352, 12288),
}


def _softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)); above 20 x itself, as in torch."""
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def _parts(x: np.ndarray, heads: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """b and a, (rows, heads) each: views of x (rows, columns)."""
    return x[:, offset : offset + heads], x[:, offset + heads : offset + 2 * heads]


def delta_gates_forward(gates, x, a_log, dt_bias, rows, heads, columns, offset):
    """gates (rows, 2, heads): -exp(a_log) softplus(a + dt_bias), and sigmoid(b)."""
    gates = gates.reshape(rows, 2, heads)
    b, a = (compute(part) for part in _parts(x.reshape(rows, columns), heads, offset))
    with np.errstate(over="ignore"):
        gates[:, 0] = -np.exp(compute(a_log)) * _softplus(a + compute(dt_bias))
        gates[:, 1] = sigmoid(b)


def delta_gates_backward(
    d_x, a_log_partial, dt_bias_partial, d_gates, gates, x, a_log, dt_bias, rows, heads, columns,
    offset,
):  # fmt: skip
    """The gradients of b and a in d_x (rows, columns), and sums over 32 rows each."""
    gates, d_gates = (g.reshape(rows, 2, heads) for g in (gates, d_gates))
    d_b, d_a = _parts(d_x.reshape(rows, columns), heads, offset)
    _, a = _parts(x.reshape(rows, columns), heads, offset)
    beta, d_decay = gates[:, 1], d_gates[:, 0]
    d_b[...] = (d_gates[:, 1] * beta * (1 - beta)).astype(d_b.dtype, copy=False)
    with np.errstate(over="ignore"):
        slope = -np.exp(compute(a_log)) * sigmoid(compute(a) + compute(dt_bias))
    of_a = d_decay * slope
    d_a[...] = of_a.astype(d_a.dtype, copy=False)
    for i in range(len(a_log_partial)):
        part = slice(i * ROWS, (i + 1) * ROWS)
        a_log_partial[i] = (d_decay[part] * gates[part, 0]).sum(0)
        dt_bias_partial[i] = of_a[part].sum(0)
