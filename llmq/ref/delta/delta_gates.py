"""Reference of the gates of a delta net or a state space: decays and betas of every token and value
head."""

import numpy as np

from llmq.ref.common import compute, sigmoid

ROWS = 32  # rows per partial sum

# name: (rows, heads, columns, offset, parts)
CASES = {
    "one_head": (1, 1, 2, 0, 2),
    "ragged": (300, 5, 24, 9, 2),
    "two_warps_of_heads": (20, 40, 96, 16, 2),
    "state_space": (70, 5, 24, 9, 1),
    "qwen35_4b": (4096, 32, 12352, 12288, 2),
    "granite4_micro": (8192, 64, 8512, 8448, 1),
}


def _softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)); x itself above 20, as in torch."""
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def _parts(x: np.ndarray, heads: int, offset: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """b and a, (rows, heads) each: views of x (rows, columns). With parts = 1, b is a."""
    last = offset + (parts - 1) * heads
    return x[:, offset : offset + heads], x[:, last : last + heads]


def delta_gates_forward(gates, x, a_log, dt_bias, least, rows, heads, columns, offset, parts):
    """gates (rows, 2, heads) = (-exp(a_log) * step, sigmoid(b)), step = max(softplus(a + dt_bias),
    least). With parts = 1 step takes the place of sigmoid(b)."""
    gates = gates.reshape(rows, 2, heads)
    b, a = (compute(part) for part in _parts(x.reshape(rows, columns), heads, offset, parts))
    with np.errstate(over="ignore"):
        step = np.maximum(_softplus(a + compute(dt_bias)), a.dtype.type(least))
        gates[:, 0] = -np.exp(compute(a_log)) * step
        gates[:, 1] = sigmoid(b) if parts == 2 else step


def delta_gates_backward(
    d_x, a_log_partial, dt_bias_partial, d_gates, gates, x, a_log, dt_bias, least, rows, heads,
    columns, offset, parts,
):  # fmt: skip
    """Write the gradients of b and a to d_x (rows, columns). a_log_partial, dt_bias_partial:
    (ceil(rows / 32), heads), the gradients of a_log and dt_bias over 32 rows each."""
    gates, d_gates = (g.reshape(rows, 2, heads) for g in (gates, d_gates))
    d_b, d_a = _parts(d_x.reshape(rows, columns), heads, offset, parts)
    a = compute(_parts(x.reshape(rows, columns), heads, offset, parts)[1]) + compute(dt_bias)
    beta, d_decay = gates[:, 1], d_gates[:, 0]
    with np.errstate(over="ignore"):
        slope, rate = sigmoid(a), -np.exp(compute(a_log))
    slope *= _softplus(a) >= least
    if parts == 2:
        d_b[...] = (d_gates[:, 1] * beta * (1 - beta)).astype(d_b.dtype, copy=False)
        of_a = d_decay * (rate * slope)
    else:
        of_a = (d_decay * rate + d_gates[:, 1]) * slope
    d_a[...] = of_a.astype(d_a.dtype, copy=False)
    for i in range(len(a_log_partial)):
        part = slice(i * ROWS, (i + 1) * ROWS)
        a_log_partial[i] = (d_decay[part] * gates[part, 0]).sum(0)
        dt_bias_partial[i] = of_a[part].sum(0)
