"""Reference of attention's output gate, whose channels follow each query head in the product."""

import numpy as np

from llmq.ref.common import compute, sigmoid

# name: (rows, Hq, Hkv, Hd)
CASES = {"one_row": (1, 1, 1, 16), "ragged": (13, 3, 1, 24), "qwen35_4b": (4096, 16, 4, 256)}


def _parts(product: np.ndarray, heads: int, kv_heads: int, size: int) -> tuple[np.ndarray, ...]:
    """Queries, gates, then keys and values: views of (rows, (2 Hq + 2 Hkv) * Hd)."""
    rows = product.reshape(-1, 2 * (heads + kv_heads), size)
    return rows[:, : 2 * heads : 2], rows[:, 1 : 2 * heads : 2], rows[:, 2 * heads :]


def attention_gate_split(qkv, gate, product, rows, heads, kv_heads, *, head_dim):
    queries, gates, others = _parts(product, heads, kv_heads, head_dim)
    packed = qkv.reshape(rows, heads + 2 * kv_heads, head_dim)
    packed[:, :heads], packed[:, heads:] = queries, others
    gate.reshape(rows, heads, head_dim)[...] = gates


def attention_gate_merge(product, qkv, gate, rows, heads, kv_heads, *, head_dim):
    queries, gates, others = _parts(product, heads, kv_heads, head_dim)
    packed = qkv.reshape(rows, heads + 2 * kv_heads, head_dim)
    queries[...], others[...] = packed[:, :heads], packed[:, heads:]
    gates[...] = gate.reshape(rows, heads, head_dim)


def attention_gate_forward(out, x, gate, n):
    """out = x * sigmoid(gate)."""
    with np.errstate(over="ignore"):
        value = sigmoid(compute(gate))
    value *= compute(x)
    out[...] = value.astype(out.dtype, copy=False)


def attention_gate_backward(d_x, d_gate, d_out, x, gate, n):
    """d_x = d_out * s, d_gate = d_out * x * s * (1 - s), s = sigmoid(gate); d_x may be d_out."""
    with np.errstate(over="ignore"):
        share = sigmoid(compute(gate))
    of_x = compute(d_out) * share
    of_gate = of_x * compute(x)
    of_gate *= 1 - share
    d_x[...] = of_x.astype(d_x.dtype, copy=False)
    d_gate[...] = of_gate.astype(d_gate.dtype, copy=False)


# -- Attention's sinks

# (B, T, Hq, Hd)
SINKS_CASES = {
    "one_row": (1, 1, 1, 16),
    "ragged": (2, 37, 3, 80),
    "heads_256": (1, 5, 2, 256),
    "gpt_oss": (4, 2048, 64, 64),
}


def attention_sinks_forward(out, lse, without, sinks, batch, seq_len, heads, *, head_dim):
    """out *= sigmoid(without - sink), lse = log(exp(without) + exp(sink))."""
    own = compute(sinks)[:, None]
    with np.errstate(over="ignore"):
        share = sigmoid(without - own)
    out[...] = compute(out) * share.transpose(0, 2, 1)[..., None]
    lse[...] = np.logaddexp(without, own)


def attention_sinks_backward(
    partial, d_out, out, lse, sinks, batch, seq_len, heads, splits, *, head_dim
):
    """partial (splits, Hq): minus the sums of exp(sink - lse) * (d_out . out) of some rows."""
    delta = np.einsum("bthd,bthd->bth", compute(d_out), compute(out))
    share = np.exp(compute(sinks)[:, None] - lse).transpose(0, 2, 1)
    each = (delta * share).reshape(-1, heads)
    step = -(-len(each) // splits)
    for split in range(splits):
        partial[split] = -each[split * step : (split + 1) * step].sum(axis=0)
