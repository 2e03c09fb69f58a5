"""Reference of attention's sinks: scores of heads that give attention to nothing."""

import numpy as np

from llmq.ref.common import compute, sigmoid

# (B, T, Hq, Hd)
CASES = {
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
