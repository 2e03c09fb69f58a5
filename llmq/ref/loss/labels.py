"""Reference of cu/loss/labels.cu: losses of labels by a score head's logits, and gradients."""

import numpy as np

from llmq.ref.common import compute

# rows, V, Vp, linear
CASES = {
    "reward": (37, 1, 64, 1),
    "two": (9, 2, 64, 0),
    "many": (65, 100, 128, 0),
    "batch": (8192, 5, 64, 0),
}


def labels(
    logits, losses, lse, hits, targets, weights, rows, vocab, padded_vocab, linear, gradient
):
    """Write losses, lse, hits and gradients of all rows; all are 0 in rows with a negative
    target."""
    x, counts = compute(logits[:, :vocab]), targets >= 0
    at = np.where(counts, targets, 0)[:, None]
    most = x.max(1, keepdims=True)
    of_row = most + np.log(np.exp(x - most).sum(1, keepdims=True))
    own = np.take_along_axis(x, at, 1)
    losses[:] = np.where(counts, (-own if linear else of_row - own)[:, 0], 0)
    lse[:] = 0 if linear else np.where(counts, of_row[:, 0], 0)
    hits[:] = 0 if linear else counts & (x.argmax(1) == at[:, 0])
    if gradient:
        made = np.zeros_like(x) if linear else np.exp(x - of_row)
        made[np.arange(rows), at[:, 0]] -= 1
        weight = counts if weights is None else np.where(counts, weights, 0)
        logits[:] = 0
        logits[:, :vocab] = weight[:, None] * made
