"""Reference of Mamba-2's state space (SSD): the recurrence that defines it, and kernels in chunks.

SSD is the delta rule without the correction. Queries, keys and values are the C, B and x of
Mamba-2; betas are the sizes of time steps. Each value head h has a state S, and the queries and
keys of group h * Hk // Hv, which are not normalized:

    S = S * exp(decay[t]) + k[t] (beta[t] * v[t])^T         0 where a document begins
    out[t] = S^T q[t] + skip * v[t]

Within a chunk of 64 tokens, S is the state before the chunk, D[i, j] the decay from token j to
token i of the same document, E the decays from S to the tokens, L the decays from the tokens to the
end, G the decay of the whole chunk:

    out = E * (q S) + scores v          scores = lower((q k^T) * D * beta) + diagonal(skip)
    S   = G * S + (L * beta * k)^T v

Dao and Gu, "Transformers are SSMs" (2024), https://arxiv.org/abs/2405.21060.
"""

from collections.abc import Iterable

import numpy as np

from llmq.ref.common import (
    CHUNK,
    begins_of,
    chunks_of,
    compute,
    decays_of,
    from_chunks,
    heads_of,
    inputs_of,
)

HEADS = 8  # value heads per part

# name: (B, T, Hk, Hv, DK, DV)
CASES = {
    "one_token": (1, 1, 1, 1, 32, 32),
    "ragged": (2, 70, 1, 2, 32, 64),
    "three_chunks": (1, 150, 2, 2, 64, 32),
    "many_heads": (1, 66, 1, 10, 128, 64),
    "whole_chunks": (2, 320, 1, 2, 64, 64),
    "granite4_micro": (4, 2048, 1, 64, 128, 64),
    "nemotron3_nano": (1, 8192, 8, 64, 128, 64),
}


def _t(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def ssd_recurrence(out, state, qkv, gates, skip, seq_len, key_heads, value_heads, *, dk, dv):
    """out and the state (B, Hv, DK, DV), token by token, from a state that an earlier call left."""
    (q, k, v), S = heads_of(compute(qkv), key_heads, value_heads, dk, dv), state
    times = value_heads // key_heads
    result = out.reshape(*out.shape[:2], value_heads, dv)
    for t in range(seq_len):
        q_t, k_t = (np.repeat(x[:, t], times, axis=1) for x in (q, k))
        S *= np.exp(gates[:, t, 0])[..., None, None]
        S += k_t[..., None] * (gates[:, t, 1, :, None] * v[:, t])[..., None, :]
        result[:, t] = np.einsum("bhdn,bhd->bhn", S, q_t) + compute(skip)[:, None] * v[:, t]


def ssd_prepare(
    scores, factors, qkv, gates, skip, starts, seq_len, key_heads, value_heads, carried, *, dk, dv
):
    """Compute the parts of chunks that need no state. scores (B, Hv, chunks, 64, 64): q k^T with
    decays and betas, and skip on the diagonal. factors (B, Hv, chunks, 2, 64): first beta * the
    decay from the token to the state after the chunk; second the decay from the state before the
    chunk to the token, 0 if the document does not see the state. The second factor of the last
    token is the decay of the state over the chunk."""
    q, k, _, decay, beta = inputs_of(qkv, gates, key_heads, value_heads, dk, dv)
    decays, from_front, _ = _within(decay, starts, carried, qkv.shape[0], seq_len)
    factors[:, :, :, 0] = decays[..., -1, :] * beta
    factors[:, :, :, 1] = from_front
    if scores is not None:
        own = np.eye(CHUNK) * compute(skip)[:, None, None, None]
        scores[...] = (q @ _t(k)) * decays * beta[..., None, :] + own


def _within(
    decay: np.ndarray, starts: np.ndarray | None, carried: int, B: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decays from token to token of each chunk, decays from the state before the chunk, and the
    position at which each token's document begins."""
    begin = begins_of(starts, carried, B, seq_len)
    sums = np.zeros_like(decay)
    total = np.zeros_like(decay[..., 0])
    for i in range(CHUNK):
        total = np.where(begin[..., i] == i, 0, total + decay[..., i])
        sums[..., i] = total
    return decays_of(begin, sums), np.where(begin < 0, np.exp(sums), 0), begin


def ssd_scan(out, state, qkv, scores, factors, seq_len, key_heads, value_heads, *, dk, dv):
    """Compute out of all chunks, from their scores and the states before them. state: the state
    before the first chunk, overwritten with the state after the last; None: 0 before the first."""
    sizes = (seq_len, key_heads, value_heads)
    states = np.empty((*factors.shape[:3], dv, dk), factors.dtype)
    ssd_states(states, state, qkv, factors, *sizes, dk=dk, dv=dv)
    q, _, v = heads_of(compute(qkv), key_heads, value_heads, dk, dv)
    q = chunks_of(q, value_heads // key_heads) * factors[:, :, :, 1, :, None]
    result = q @ _t(states) + compute(scores) @ chunks_of(v)
    out[...] = from_chunks(result, seq_len).reshape(out.shape)


def ssd_states(states, state, qkv, factors, seq_len, key_heads, value_heads, *, dk, dv):
    """Write the states before chunks, transposed (DV, DK), from chunk to chunk as ssd_scan does."""
    _, k, v = heads_of(compute(qkv), key_heads, value_heads, dk, dv)
    k = chunks_of(k, value_heads // key_heads) * factors[:, :, :, 0, :, None]
    _walk(states, state, k, chunks_of(v), factors, range(states.shape[2]))


def _walk(
    states: np.ndarray,
    state: np.ndarray | None,
    rows: np.ndarray,
    others: np.ndarray,
    factors: np.ndarray,
    order: Iterable[int],
) -> None:
    """For each chunk c in order: states[c] = S^T, then S = G * S + rows^T others."""
    B, Hv, _, dv, dk = states.shape
    S = np.zeros((B, Hv, dk, dv), factors.dtype) if state is None else state.copy()
    for c in order:
        states[:, :, c] = _t(S)
        S = factors[:, :, c, 1, -1, None, None] * S + _t(rows[:, :, c]) @ others[:, :, c]
    if state is not None:
        state[...] = S


def ssd_scan_backward(
    d_qkv, d_states, d_state, d_out, qkv, scores, factors, seq_len, key_heads, value_heads, *,
    dk, dv,
):  # fmt: skip
    """Write gradients of the states after chunks (DV, DK), from the last chunk to the first, and of
    the values in d_qkv. d_state: gradient of the state after the last chunk, overwritten with the
    gradient of the state before the first; None: 0 after the last chunk."""
    q, k, _ = heads_of(compute(qkv), key_heads, value_heads, dk, dv)
    q, k = (
        chunks_of(x, value_heads // key_heads) * factors[:, :, :, i, :, None]
        for i, x in ((1, q), (0, k))
    )
    d_o = chunks_of(compute(d_out).reshape(*d_out.shape[:2], value_heads, dv))
    wide = np.empty(d_states.shape, factors.dtype)
    _walk(wide, d_state, q, d_o, factors, reversed(range(q.shape[2])))
    d_states[...] = wide
    d_v = k @ _t(wide) + _t(compute(scores)) @ d_o
    heads_of(d_qkv, key_heads, value_heads, dk, dv)[2][...] = from_chunks(d_v, seq_len)


def ssd_gradients(
    d_keys, d_gates, skip_partial, d_out, states, d_states, qkv, gates, starts, seq_len, key_heads,
    value_heads, carried, *, dk, dv,
):  # fmt: skip
    """Write gradients of queries, keys, decays, betas and skips, each chunk by itself.
    skip_partial: (B, chunks, Hv). d_keys: (parts, B, T, 2 Hk DK), gradients of queries and keys; a
    part is the sum over HEADS value heads of each group."""
    B = qkv.shape[0]
    q, k, v, decay, beta = inputs_of(qkv, gates, key_heads, value_heads, dk, dv)
    decays, from_front, begin = _within(decay, starts, carried, B, seq_len)
    d_o = chunks_of(compute(d_out).reshape(B, seq_len, value_heads, dv))
    S, dS = compute(states), compute(d_states)
    d_scores = d_o @ _t(v)
    skip_partial[...] = np.trace(d_scores, axis1=-2, axis2=-1).transpose(0, 2, 1)
    d_scores *= decays
    by_front = from_front[..., None] * (d_o @ S)
    by_behind = decays[..., -1, :, None] * (v @ dS)
    pairs, to_state = d_scores * (q @ _t(k)), (by_behind * k).sum(-1)
    d_beta = pairs.sum(-2) + to_state
    d_scores *= beta[..., None, :]
    # Gradients of the sums of decays, through D and both factors.
    inner = np.tril(pairs * beta[..., None, :], -1)
    d_sums = inner.sum(-1) - inner.sum(-2) + (by_front * q).sum(-1) - beta * to_state
    d_sums[..., -1] += (beta * to_state).sum(-1) + from_front[..., -1] * (S * dS).sum((-1, -2))
    at = np.arange(CHUNK)
    behind = (begin[..., :, None] <= at) & (at <= at[:, None])  # [i, j]: j <= i, in i's document
    d_decay = (behind * d_sums[..., None]).sum(-2)
    for i, value in enumerate((np.where(begin == at, 0, d_decay), d_beta)):
        d_gates[:, :, i] = from_chunks(value, seq_len)
    d_q, d_k = d_scores @ k + by_front, _t(d_scores) @ q + beta[..., None] * by_behind
    for i, gradient in enumerate((d_q, d_k)):
        whole = from_chunks(gradient, seq_len).reshape(B, seq_len, key_heads, -1, dk)
        for part, target in enumerate(d_keys):
            own = whole[..., part * HEADS : (part + 1) * HEADS, :].sum(3)
            target.reshape(B, seq_len, 2, key_heads, dk)[:, :, i] = own


def ssd_sum(d_qkv, d_keys, rows, parts, keys, columns, *, dk, dv):
    """Write the first `keys` columns of d_qkv (rows, columns): sums of d_keys over parts."""
    d_qkv.reshape(rows, columns)[:, :keys] = compute(d_keys).sum(0).reshape(rows, keys)
