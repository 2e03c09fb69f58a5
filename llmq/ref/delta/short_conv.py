"""Reference of the causal short convolution of each channel within documents, with or without
SiLU."""

import numpy as np

from llmq.ref.common import compute, sigmoid, silu_slope

SPAN = 512  # tokens per partial sum

# name: (B, T, channels, columns, taps)
CASES = {
    "one_token": (1, 1, 8, 8, 4),
    "ragged": (2, 70, 40, 56, 4),
    "two_taps": (1, 130, 136, 136, 2),
    "qwen35_4b": (4, 1024, 8192, 12352, 4),
}


def _inputs(
    x: np.ndarray, before: np.ndarray | None, starts: np.ndarray | None, channels: int, taps: int
) -> np.ndarray:
    """(B, T, channels, taps): the inputs that each token's taps multiply, the token itself last."""
    B, T, _ = x.shape
    x = compute(x[..., :channels])
    old = np.zeros((B, taps - 1, channels), x.dtype)
    if before is not None:
        old[...] = before
    wide = np.concatenate([old, x], axis=1)
    met = np.stack([wide[:, i : i + T] for i in range(taps)], axis=-1)
    if starts is not None:
        at = np.arange(T)[:, None] - np.arange(taps - 1, -1, -1)
        met[~np.broadcast_to((at >= starts[..., None])[:, :, None], met.shape)] = 0
    return met


def short_conv_forward(
    out, x, weight, bias, before, starts, seq_len, channels, columns, *, taps, silu=1
):
    """out (B, T, channels) = silu(bias + sum over taps of weight (channels, taps) * x), x (B, T,
    columns). bias: (channels,); None: 0. before: (B, taps - 1, channels), inputs of the preceding
    tokens; None: 0."""
    z = (_inputs(x, before, starts, channels, taps) * compute(weight)).sum(-1)
    if bias is not None:
        z += compute(bias)
    if silu:
        with np.errstate(over="ignore"):
            z *= sigmoid(z)
    out[...] = z.astype(out.dtype, copy=False)


def short_conv_keep(before, x, seq_len, channels, columns, *, taps, silu=1):
    """Write the inputs of the last taps - 1 tokens of before and x to before."""
    wide = np.concatenate([before, compute(x[..., :channels])], axis=1)
    before[...] = wide[:, -before.shape[1] :]


def short_conv_backward(
    d_x, partial, bias_partial, d_out, x, weight, bias, starts, seq_len, channels, columns, *,
    taps, silu=1,
):  # fmt: skip
    """Write the first channels of d_x (B, T, columns), partial (B * spans, channels * taps) and
    bias_partial (B * spans, channels): gradients of weight and bias over 512 tokens each."""
    T = x.shape[1]
    met, w = _inputs(x, None, starts, channels, taps), compute(weight)
    z = (met * w).sum(-1)
    if bias is not None:
        z += compute(bias)
    d_z = compute(d_out)
    if silu:
        with np.errstate(over="ignore"):
            d_z = d_z * silu_slope(z, sigmoid(z))
    spans = -(-T // SPAN)
    for i in range(spans if partial is not None else 0):
        part = slice(i * SPAN, (i + 1) * SPAN)
        sums = np.einsum("btc,btcj->bcj", d_z[:, part], met[:, part])
        partial[i::spans] = sums.reshape(-1, *partial.shape[1:])
        if bias_partial is not None:
            bias_partial[i::spans] = d_z[:, part].sum(1)
    total = np.zeros_like(d_z)
    for ahead in range(min(taps, T)):
        term = d_z[:, ahead:] * w[:, taps - 1 - ahead]
        if starts is not None:
            term[starts[:, ahead:] > np.arange(T - ahead)] = 0
        total[:, : T - ahead] += term
    d_x[..., :channels] = total.astype(d_x.dtype, copy=False)
