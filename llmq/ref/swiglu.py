"""References of cu/swiglu.cu: out = up * silu(gate), and its gradient; with gelu of gelu(gate)."""

import numpy as np

from llmq.ref.common import (
    BF16,
    compute,
    decoded,
    emit_fp8,
    gelu_share,
    gelu_slope,
    look_at_codes,
    row_blocks,
    sigmoid,
    silu_slope,
    update_abs_max,
)

# rows, F
CASES = {
    "one_vector": (1, 8),
    "ragged_block": (5, 24),
    "several_blocks": (37, 344),
    "one_tile": (128, 64),
    "ragged_tiles": (144, 80),
    "qwen05b": (32 * 1024, 4864),
    "qwen15b": (32 * 1024, 8960),
}


def swiglu_forward(out, up_gate, rows, F, abs_max=None, *, gelu=0):
    out, up_gate = out.reshape(rows, F), up_gate.reshape(rows, 2 * F)
    with np.errstate(over="ignore"):
        for block in row_blocks(rows, F):
            up, gate = compute(up_gate[block, :F]), compute(up_gate[block, F:])
            value = (gelu_share if gelu else sigmoid)(gate)
            value *= gate
            np.multiply(value, up, out=out[block], casting="same_kind")
            update_abs_max(abs_max, out[block])


def swiglu_backward(d_up_gate, d_out, up_gate, rows, F, abs_max=None, out=None, *, gelu=0):
    """out: forward's result again; may be d_out."""
    d_out = d_out.reshape(rows, F)
    if d_up_gate is None:
        d_up_gate = np.empty((rows, 2 * F), up_gate.dtype)
    up_gate, d_up_gate = up_gate.reshape(rows, 2 * F), d_up_gate.reshape(rows, 2 * F)
    with np.errstate(over="ignore"):
        for block in row_blocks(rows, F):
            up, gate = compute(up_gate[block, :F]), compute(up_gate[block, F:])
            d = compute(d_out[block])
            s = (gelu_share if gelu else sigmoid)(gate)
            slope = (gelu_slope if gelu else silu_slope)(gate, s)
            slope *= up
            slope *= d
            active = np.multiply(gate, s, out=s)
            again = None if out is None else active * up
            active *= d
            if out is not None:  # last of all that needs d, which it may overwrite
                out.reshape(rows, F)[block] = again
            d_up_gate[block, :F] = active
            d_up_gate[block, F:] = slope
            update_abs_max(abs_max, d_up_gate[block])


def swiglu_forward_fp8(out, up_gate, rows, F, abs_max, *fp8, gelu=0):
    """swiglu_forward, and the result in FP8. fp8: codes, transposed, scale, saturated, then of an
    up_gate that is codes: scale, largest, abs_max, saturated."""
    *codes, in_scale, in_largest, in_abs_max, in_saturated = fp8
    look_at_codes(up_gate, in_scale, in_largest, in_abs_max, in_saturated)
    up_gate = decoded(up_gate.reshape(rows, 2 * F), in_scale)
    if out is None:
        out = np.empty((rows, F), BF16 if in_scale is not None else up_gate.dtype)
    swiglu_forward(out, up_gate, rows, F, abs_max, gelu=gelu)
    emit_fp8(*codes, out.reshape(rows, F))


def swiglu_backward_fp8(d_up_gate, d_out, up_gate, rows, F, abs_max, *fp8, gelu=0):
    """swiglu_backward, and the results in FP8. fp8: codes, transposed, scale, saturated, then out,
    out_transposed, out_scale, out_saturated, then of inputs that are codes: the scale of up_gate,
    then of d_out scale, largest, abs_max, saturated."""
    *codes, out, out_transposed, out_scale, out_saturated = fp8[:8]
    up_scale, in_scale, in_largest, in_abs_max, in_saturated = fp8[8:]
    result = BF16 if up_scale is not None else up_gate.dtype
    look_at_codes(d_out, in_scale, in_largest, in_abs_max, in_saturated)
    d_out = decoded(d_out.reshape(rows, F), in_scale)
    up_gate = decoded(up_gate.reshape(rows, 2 * F), up_scale)
    if d_up_gate is None:
        d_up_gate = np.empty((rows, 2 * F), result)
    if out_transposed is not None:
        out = np.empty((rows, F), result)
    swiglu_backward(d_up_gate, d_out, up_gate, rows, F, abs_max, out, gelu=gelu)
    emit_fp8(*codes, d_up_gate.reshape(rows, 2 * F))
    if out_transposed is not None:
        emit_fp8(None, out_transposed, out_scale, out_saturated, out.reshape(rows, F))


# -- The gradient where rows have weights


def weighted_swiglu_backward(
    d_up_gate, d_weights, weighted, d_out, up_gate, order, weights, rows, F, abs_max, *fp8
):
    """d_weights (S, top_k) and weighted (rows, F) as rows_combine_backward has them, of forward's
    result, then swiglu_backward_fp8. fp8: codes, transposed, scale, saturated."""
    out, d, weight = np.empty_like(d_out), d_out.copy(), weights.reshape(-1)[order]
    swiglu_forward(out, up_gate, rows, F)
    for block in row_blocks(rows, F):
        of_out, values = compute(d_out[block]), compute(out[block])
        d_weights.reshape(-1)[order[block]] = np.add.reduce(of_out * values, axis=1)
        d[block] = of_out * weight[block, None]
        if weighted is not None:
            weighted[block] = values * weight[block, None]
    swiglu_backward_fp8(d_up_gate, d, up_gate, rows, F, abs_max, *fp8, *[None] * 9)


# -- The gated activation of pairs that are cut off

# rows, F
CLAMPED_CASES = {"one": (1, 8), "ragged": (37, 24), "gpt_oss_20b": (32768, 2880)}


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
