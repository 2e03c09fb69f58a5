"""Reference of the gated activation of pairs that are cut off."""

import numpy as np

from llmq.ref.common import compute, sigmoid

# rows, F
CASES = {"one": (1, 8), "ragged": (37, 24), "gpt_oss_20b": (32768, 2880)}


def _parts(
    pairs: np.ndarray, alpha: float, limit: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """gate and up as they are, cut off, and the sigmoid."""
    x = compute(pairs)
    gate, up = x[..., ::2], x[..., 1::2]
    cut = np.minimum(gate, x.dtype.type(limit))
    with np.errstate(over="ignore"):
        share = sigmoid(cut * x.dtype.type(alpha))
    return gate, up, cut, share


def clamped_swiglu_forward(out, pairs, n, alpha, limit):
    """out = (up + 1) * gate * sigmoid(alpha * gate), cut off before."""
    _, up, gate, share = _parts(pairs, alpha, limit)
    out[...] = (np.clip(up, -limit, limit) + 1) * (gate * share)


def clamped_swiglu_backward(d_pairs, d_out, pairs, n, alpha, limit):
    """The gradient of forward; nothing where something is cut off. d_pairs may be pairs."""
    raw, up, gate, share = _parts(pairs, alpha, limit)
    d = compute(d_out)
    slope = share * (1 + share.dtype.type(alpha) * gate * (1 - share))
    d_gate = np.where(raw > limit, 0, d * (np.clip(up, -limit, limit) + 1) * slope)
    d_up = np.where(np.abs(up) > limit, 0, d * (gate * share))
    d_pairs[..., ::2], d_pairs[..., 1::2] = d_gate, d_up
