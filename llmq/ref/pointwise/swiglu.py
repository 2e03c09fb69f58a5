"""References of cu/pointwise/swiglu.cu: out = up * silu(gate), or up * gelu(gate) with gelu, and
the gradients."""

import numpy as np

from llmq.ref.common import (
    compute,
    row_blocks,
    sigmoid,
    swiglu_backward,  # noqa: F401 - of a kernel
    swiglu_backward_fp8,
    swiglu_forward,
    swiglu_forward_fp8,  # noqa: F401 - of a kernel
)

# rows, F
CASES = {
    "one_vector": (1, 8),
    "ragged_block": (5, 24),
    "several_blocks": (37, 344),
    "one_tile": (128, 64),
    "ragged_tiles": (144, 80),
    "rows_of_no_16": (148, 80),
    "qwen05b": (32 * 1024, 4864),
    "qwen15b": (32 * 1024, 8960),
}


# -- The gradient where rows have weights


def weighted_swiglu_backward(
    d_up_gate, d_weights, weighted, d_out, up_gate, order, weights, rows, F, abs_max, *fp8, gelu=0
):
    """Write d_weights (S, top_k) and weighted (rows, F) as rows_combine_backward does with y =
    forward's output; then run swiglu_backward_fp8. fp8: codes, transposed, scale, saturated."""
    out, d, weight = np.empty_like(d_out), d_out.copy(), weights.reshape(-1)[order]
    swiglu_forward(out, up_gate, rows, F, gelu=gelu)
    for block in row_blocks(rows, F):
        of_out, values = compute(d_out[block]), compute(out[block])
        d_weights.reshape(-1)[order[block]] = np.add.reduce(of_out * values, axis=1)
        d[block] = of_out * weight[block, None]
        if weighted is not None:
            weighted[block] = values * weight[block, None]
    rest = (rows, rows, F, abs_max, *fp8, *[None] * 9)
    swiglu_backward_fp8(d_up_gate, d, up_gate, *rest, gelu=gelu)


# -- The gated activation of clamped pairs

# rows, F
CLAMPED_CASES = {"one": (1, 8), "ragged": (37, 24), "gpt_oss_20b": (32768, 2880)}


def _parts(
    pairs: np.ndarray, alpha: float, limit: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """gate and up without clamping, the clamped gate, and sigmoid(alpha * clamped gate)."""
    x = compute(pairs)
    gate, up = x[..., ::2], x[..., 1::2]
    cut = np.minimum(gate, x.dtype.type(limit))
    with np.errstate(over="ignore"):
        share = sigmoid(cut * x.dtype.type(alpha))
    return gate, up, cut, share


def clamped_swiglu_forward(out, pairs, n, alpha, limit):
    """out = (up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped to `limit`."""
    _, up, gate, share = _parts(pairs, alpha, limit)
    out[...] = (np.clip(up, -limit, limit) + 1) * (gate * share)


def clamped_swiglu_backward(d_pairs, d_out, pairs, n, alpha, limit):
    """The gradient of forward; 0 for a gate or up that is clamped. d_pairs may be pairs."""
    raw, up, gate, share = _parts(pairs, alpha, limit)
    d = compute(d_out)
    slope = share * (1 + share.dtype.type(alpha) * gate * (1 - share))
    d_gate = np.where(raw > limit, 0, d * (np.clip(up, -limit, limit) + 1) * slope)
    d_up = np.where(np.abs(up) > limit, 0, d * (gate * share))
    d_pairs[..., ::2], d_pairs[..., 1::2] = d_gate, d_up
