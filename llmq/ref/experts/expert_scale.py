"""References of cu/experts/expert_scale.cu: trained factors of experts."""

import numpy as np

from llmq.ref.common import compute

CASES = {"tiny": (64, 8, 2), "gemma4_26b": (8192, 128, 8)}  # tokens, experts, choices per token


def expert_scale_forward(out, weights, scale, chosen, n):
    out[...] = weights * compute(scale)[chosen]


def expert_scale_backward(d_weights, d_scale, weights, scale, order, starts):
    """d_scale: sums over each expert's choices; then d_weights *= the scale of the expert."""
    d, w, factors = d_weights.reshape(-1), weights.reshape(-1), compute(scale)
    experts = np.repeat(np.arange(scale.size), np.diff(starts))
    d_scale[0] = np.bincount(experts, (d * w)[order], scale.size)
    d[order] *= factors[experts]
