"""Reference of the gated delta rule: the recurrence that defines it, and its kernels in chunks.

Each value head h has a state S. Its queries and keys are those of head h * Hk // Hv, divided by
their lengths:

    S = S * exp(decay[t])                         0 where a document begins
    change[t] = beta[t] * (v[t] - S^T k[t])
    S = S + k[t] change[t]^T
    out[t] = S^T q[t] / sqrt(DK)

Within a chunk of 64 tokens, all changes follow from a triangular system (the WY form). S is the
state before the chunk, D[i, j] the decay from token j to token i of the same document, E the decays
from S to the tokens, L the decays from the tokens to the end, G the decay of the whole chunk:

    inverse = (1 + lower(beta * (k k^T) * D))^-1
    change  = u - w S                     u = inverse (beta * v), w = inverse (beta * E * k)
    out     = E * (q S) + lower((q k^T) * D) change
    S       = G * S + (L * k)^T change

Yang et al., "Gated Delta Networks" (2024), https://arxiv.org/abs/2412.06464.
"""

from __future__ import annotations

from typing import NamedTuple

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

EPS = 1e-6  # added to the squared lengths of queries and keys

# name: (B, T, Hk, Hv, DK, DV)
CASES = {
    "one_token": (1, 1, 1, 1, 32, 32),
    "ragged": (2, 70, 1, 2, 32, 64),
    "three_chunks": (1, 150, 2, 2, 64, 32),
    "head_128": (1, 66, 1, 1, 128, 128),
    "whole_chunks": (2, 320, 1, 2, 64, 128),
    "qwen35_4b": (4, 1024, 16, 32, 128, 128),
    "qwen35_4b_long": (1, 32768, 16, 32, 128, 128),
}


class Factors(NamedTuple):
    """Numbers of all tokens of chunks, (B, Hv, chunks, 64) each. to_key: the decay to the state
    after the chunk / the key's length. from_query: from_state / (the query's length * sqrt(DK)).
    sums: sum of log decays since the first token of the document, or of the chunk. from_state: the
    decay from the state before the chunk, 0 if the document does not see the state; at the last
    token, the decay of the state over the chunk. key_length: 1 / the key's length. query_length: 1
    / (the query's length * sqrt(DK))."""

    to_key: np.ndarray
    from_query: np.ndarray
    sums: np.ndarray
    from_state: np.ndarray
    key_length: np.ndarray
    query_length: np.ndarray

    @classmethod
    def of(cls, factors: np.ndarray) -> Factors:
        """The fields as views of factors (B, Hv, chunks, 6, 64)."""
        return cls(*np.moveaxis(factors, 3, 0))

    @property
    def whole(self) -> np.ndarray:
        """The decay of the state over each chunk, (B, Hv, chunks, 1, 1)."""
        return self.from_state[..., -1:, None]


def _t(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def delta_rule_recurrence(out, state, qkv, gates, seq_len, key_heads, value_heads, *, dk, dv):
    """out and the state (B, Hv, DK, DV), token by token, from a state that an earlier call left."""
    (q, k, v), S = heads_of(compute(qkv), key_heads, value_heads, dk, dv), state
    scale, times = S.dtype.type(dk**-0.5), value_heads // key_heads
    result = out.reshape(*out.shape[:2], value_heads, dv)
    for t in range(seq_len):
        q_t, k_t = (
            np.repeat(x[:, t] / np.sqrt((x[:, t] ** 2).sum(-1, keepdims=True) + EPS), times, axis=1)
            for x in (q, k)
        )
        S *= np.exp(gates[:, t, 0])[..., None, None]
        change = gates[:, t, 1, :, None] * (v[:, t] - np.einsum("bhdn,bhd->bhn", S, k_t))
        S += k_t[..., None] * change[..., None, :]
        result[:, t] = np.einsum("bhdn,bhd->bhn", S, q_t) * scale


def delta_rule_prepare(
    u, w, inverse, scores, factors, qkv, gates, starts, seq_len, key_heads, value_heads, carried, *,
    dk, dv,
):  # fmt: skip
    """Compute the parts of chunks that need no state; each result is (B, Hv, chunks, ...). factors:
    see Factors. u (64, DV), w (64, DK): change = u - w S, with S before the chunk. inverse (64,
    64): the inverse of the triangular system. scores (64, 64): q k^T with decays."""
    q, k, v, decay, beta = inputs_of(qkv, gates, key_heads, value_heads, dk, dv)
    begin = begins_of(starts, carried, qkv.shape[0], seq_len)
    f = Factors.of(factors)
    total = np.zeros_like(beta[..., 0])
    for i in range(CHUNK):
        total = np.where(begin[..., i] == i, 0, total + decay[..., i])
        f.sums[..., i] = total
    decays = decays_of(begin, f.sums)
    f.from_state[...] = np.where(begin < 0, np.exp(f.sums), 0)
    for x, length in ((k, f.key_length), (q, f.query_length)):
        length[...] = 1 / np.sqrt((x * x).sum(axis=-1) + x.dtype.type(EPS))
    f.query_length[...] *= q.dtype.type(dk**-0.5)
    f.to_key[...] = decays[..., -1, :] * f.key_length
    f.from_query[...] = f.from_state * f.query_length
    k = k * f.key_length[..., None]
    system = np.tril(beta[..., None] * (k @ _t(k)) * decays, -1)
    solved = np.linalg.inv(system + np.eye(CHUNK, dtype=system.dtype))
    u[...] = solved @ (beta[..., None] * v)
    w[...] = solved @ ((beta * f.from_state)[..., None] * k)
    if inverse is not None:
        inverse[...] = solved
    if scores is not None:
        scores[...] = (q * f.query_length[..., None] @ _t(k)) * decays


def delta_rule_scan(
    out, state, qkv, u, w, scores, factors, seq_len, key_heads, value_heads, *, dk, dv
):
    """Compute out from chunk to chunk. state: the state before the first chunk, overwritten with
    the state after the last chunk; None: 0 before the first chunk."""
    B, Hv, chunks = u.shape[:3]
    states, changes = np.empty((B, Hv, chunks, dv, dk), factors.dtype), np.empty_like(compute(u))
    sizes = (seq_len, key_heads, value_heads)
    delta_rule_states(states, changes, state, qkv, u, w, factors, *sizes, dk=dk, dv=dv)
    q = heads_of(compute(qkv), key_heads, value_heads, dk, dv)[0]
    q = chunks_of(q, value_heads // key_heads) * Factors.of(factors).from_query[..., None]
    result = q @ _t(states) + compute(scores) @ changes
    out[...] = from_chunks(result, seq_len).reshape(out.shape)


def delta_rule_states(
    states, changes, state, qkv, u, w, factors, seq_len, key_heads, value_heads, *, dk, dv
):
    """Run delta_rule_scan's loop over chunks. states: the state before each chunk, transposed (DV,
    DK). changes: the changes in each chunk."""
    f, (u, w) = Factors.of(factors), (compute(x) for x in (u, w))
    k = heads_of(compute(qkv), key_heads, value_heads, dk, dv)[1]
    k = chunks_of(k, value_heads // key_heads) * f.to_key[..., None]
    S = np.zeros((*u.shape[:2], dk, dv), factors.dtype) if state is None else state.copy()
    for i in range(u.shape[2]):
        states[:, :, i] = _t(S)
        change = u[:, :, i] - w[:, :, i] @ S
        changes[:, :, i] = change
        S = f.whole[:, :, i] * S + _t(k[:, :, i]) @ change
    if state is not None:
        state[...] = S


def delta_rule_scan_backward(
    d_changes, d_states, d_state, d_out, qkv, w, scores, factors, seq_len, key_heads, value_heads,
    *, dk, dv,
):  # fmt: skip
    """Write gradients of the states after chunks (DV, DK) and of the changes, from the last chunk
    to the first. d_state: gradient of the state after the last chunk, overwritten with the gradient
    of the state before the first; None: 0 after the last chunk."""
    f, times = Factors.of(factors), value_heads // key_heads
    q, k, _ = heads_of(compute(qkv), key_heads, value_heads, dk, dv)
    q, k = chunks_of(q, times) * f.from_query[..., None], chunks_of(k, times) * f.to_key[..., None]
    w, d_out = compute(w), compute(d_out).reshape(*d_out.shape[:2], value_heads, dv)
    d_o = chunks_of(d_out)
    local = _t(compute(scores)) @ d_o
    dS = np.zeros((*w.shape[:2], dk, dv), w.dtype) if d_state is None else d_state.copy()
    for i in reversed(range(w.shape[2])):
        d_states[:, :, i] = _t(dS)
        d_change = local[:, :, i] + k[:, :, i] @ dS
        d_changes[:, :, i] = d_change
        dS = f.whole[:, :, i] * dS + _t(q[:, :, i]) @ d_o[:, :, i] - _t(w[:, :, i]) @ d_change
    if d_state is not None:
        d_state[...] = dS


def delta_rule_gradients(
    d_qkv, d_gates, d_out, changes, d_changes, states, d_states, inverse, factors, qkv, gates,
    starts, seq_len, key_heads, value_heads, carried, *, dk, dv,
):  # fmt: skip
    """Write gradients of queries, keys, values, decays and betas, each chunk by itself."""
    f, B = Factors.of(factors), qkv.shape[0]
    q, k, v, _, beta = inputs_of(qkv, gates, key_heads, value_heads, dk, dv)
    begin = begins_of(starts, carried, B, seq_len)
    decays, at = decays_of(begin, f.sums), np.arange(CHUNK)
    q, k = q * f.query_length[..., None], k * f.key_length[..., None]
    d_o = chunks_of(compute(d_out).reshape(B, seq_len, value_heads, dv))
    change, d_change, S, dS = (compute(x) for x in (changes, d_changes, states, d_states))
    d_rest = _t(compute(inverse)) @ d_change
    by_o, by_rest = f.from_state[..., None] * (d_o @ S), f.from_state[..., None] * (d_rest @ S)
    by_change = decays[..., -1, :, None] * (change @ dS)
    d_scores = (d_o @ _t(change)) * decays
    d_system = np.tril(-(d_rest @ _t(change)) * decays, -1)
    kk, qk, beta_ = k @ _t(k), q @ _t(k), beta[..., None]
    d_beta = (d_rest * v).sum(-1) - (by_rest * k).sum(-1) + (d_system * kk).sum(-1)
    d_q = d_scores @ k + by_o
    d_k = _t(d_scores) @ q + by_change - beta_ * by_rest
    d_k += (beta_ * d_system) @ k + _t(beta_ * d_system) @ k
    # Gradients of the sums of decays, through D, from_state and to_key.
    inner = np.tril(d_scores * qk + beta_ * d_system * kk, -1)
    d_sums = inner.sum(-1) - inner.sum(-2) + (by_o * q).sum(-1) - beta * (by_rest * k).sum(-1)
    to_state = (by_change * k).sum(-1)
    d_sums -= to_state
    d_sums[..., -1] += to_state.sum(-1) + f.from_state[..., -1] * (S * dS).sum((-1, -2))
    behind = (begin[..., :, None] <= at) & (at <= at[:, None])  # [i, j]: j <= i, in i's document
    d_decay = (behind * d_sums[..., None]).sum(-2)
    for i, value in enumerate((np.where(begin == at, 0, d_decay), d_beta)):
        d_gates[:, :, i] = from_chunks(value, seq_len)
    d_raws = heads_of(d_qkv, key_heads, value_heads, dk, dv)
    d_raws[2][...] = from_chunks(beta_ * d_rest, seq_len)
    of_length = ((d_q, q * q.dtype.type(dk**0.5), f.query_length), (d_k, k, f.key_length))
    for target, (d_unit, unit, length) in zip(d_raws[:2], of_length, strict=True):
        d_raw = length[..., None] * (d_unit - unit * (unit * d_unit).sum(-1, keepdims=True))
        d_raw = from_chunks(d_raw, seq_len)
        target[...] = d_raw.reshape(B, seq_len, key_heads, -1, dk).sum(3)


# The kernels with matrix instructions have the same references.
delta_rule_scan_sm90 = delta_rule_scan
delta_rule_states_sm90 = delta_rule_states
delta_rule_scan_backward_sm90 = delta_rule_scan_backward
