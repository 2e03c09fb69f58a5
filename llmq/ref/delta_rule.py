"""Reference of the gated delta rule: the recurrence that defines it, and its kernels in chunks.

Each value head h has a state S. Its queries and keys are those of head h * Hk // Hv, divided by
their lengths:

    S = S * exp(decay[t])                         0 where a document begins
    change[t] = beta[t] * (v[t] - S^T k[t])
    S = S + k[t] change[t]^T
    out[t] = S^T q[t] / sqrt(DK)

In a chunk of 64 tokens, with S in front of it, and D[i, j] the decay from token j to i of one
document, all changes follow from a triangular system (the WY form):

    change = inverse(1 + lower(beta * (k k^T) * D)) (beta * (v - E * (k S)))
    out    = E * (q S) + lower((q k^T) * D) change
    S      = G * S + (L * k)^T change

Yang et al., "Gated Delta Networks" (2024), https://arxiv.org/abs/2412.06464.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmq.ref.common import compute

CHUNK = 64
EPS = 1e-6  # of lengths of queries and keys

# name: (B, T, Hk, Hv, DK, DV)
CASES = {
    "one_token": (1, 1, 1, 1, 32, 32),
    "ragged": (2, 70, 1, 2, 32, 64),
    "three_chunks": (1, 150, 2, 2, 64, 32),
    "head_128": (1, 66, 1, 1, 128, 128),
    "qwen35_4b": (4, 1024, 16, 32, 128, 128),
    "qwen35_4b_long": (1, 32768, 16, 32, 128, 128),
}


class Chunk(NamedTuple):
    """The tokens [first, stop) of all sequences and value heads, and what the state is there.

    q, k: (B, Hv, C, DK), of length 1, queries divided by sqrt(DK). v: (B, Hv, C, DV). beta:
    (B, Hv, C). q_length, k_length: (B, Hv, C, 1), 1 / length. decays: (B, Hv, C, C), of j up to i;
    0 where j is behind i or of another document. from_state, to_state: (B, Hv, C), of the state in
    front to i, and of i to the state behind. whole: (B, Hv), of the state itself. same: bool
    (B, C, C), that j is not behind i, and of its document. begins: bool (B, C), of documents.
    """

    first: int
    stop: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    beta: np.ndarray
    q_length: np.ndarray
    k_length: np.ndarray
    decays: np.ndarray
    from_state: np.ndarray
    to_state: np.ndarray
    whole: np.ndarray
    same: np.ndarray
    begins: np.ndarray


def heads_of(
    qkv: np.ndarray, key_heads: int, value_heads: int, dk: int, dv: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys (B, T, Hk, DK) and values (B, T, Hv, DV): views of qkv (B, T, ...)."""
    B, T, _ = qkv.shape
    width = key_heads * dk
    parts = (qkv[..., :width], qkv[..., width : 2 * width], qkv[..., 2 * width :])
    shapes = ((key_heads, dk), (key_heads, dk), (value_heads, dv))
    return tuple(p.reshape(B, T, *s) for p, s in zip(parts, shapes, strict=True))


def _chunks(
    qkv: np.ndarray,
    gates: np.ndarray,
    starts: np.ndarray | None,
    carried: int,
    key_heads: int,
    value_heads: int,
    dk: int,
    dv: int,
) -> list[Chunk]:
    qkv, gates = compute(qkv), compute(gates)
    B, T, _ = qkv.shape
    q, k, v = (x.swapaxes(1, 2) for x in heads_of(qkv, key_heads, value_heads, dk, dv))
    lengths = [
        1 / np.sqrt((x * x).sum(axis=-1, keepdims=True) + qkv.dtype.type(EPS)) for x in (q, k)
    ]
    times = value_heads // key_heads
    q, k, q_length, k_length = (
        np.repeat(x, times, axis=1)
        for x in (q * lengths[0] * qkv.dtype.type(dk**-0.5), k * lengths[1], *lengths)
    )
    decay, beta = (gates[:, :, i].swapaxes(1, 2) for i in (0, 1))
    if starts is None:
        starts = np.full((B, T), -1 if carried else 0, np.int32)
    chunks = []
    for first in range(0, T, CHUNK):
        stop = min(first + CHUNK, T)
        at = np.arange(first, stop)
        begin = starts[:, first:stop]
        begins = begin == at
        sees = begin < first  # the state in front
        g = np.where(begins[:, None], 0, decay[:, :, first:stop])
        C = stop - first
        # Sums over the tokens of the same document, up to each one and in order.
        sums = np.empty_like(g)
        for i in range(C):
            before = sums[:, :, i - 1] if i else 0
            sums[:, :, i] = np.where(begins[:, None, i], 0, before + g[:, :, i])
        same = (begin[:, :, None] <= at) & (at <= at[:, None])
        with np.errstate(over="ignore"):
            decays = np.exp(sums[..., :, None] - sums[..., None, :])
        decays = np.where(same[:, None], decays, 0)
        from_state = np.where(sees[:, None], np.exp(sums), 0)
        part = (slice(None), slice(None), slice(first, stop))
        chunks.append(
            Chunk(
                first, stop, q[part], k[part], v[part], beta[part], q_length[part],
                k_length[part], decays, from_state, decays[:, :, -1], from_state[:, :, -1],
                same, begins,
            )
        )  # fmt: skip
    return chunks


def _t(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def delta_rule_recurrence(
    out: np.ndarray,
    state: np.ndarray,
    qkv: np.ndarray,
    gates: np.ndarray,
    seq_len: int,
    key_heads: int,
    value_heads: int,
    *,
    dk: int,
    dv: int,
) -> None:
    """out and the state (B, Hv, DK, DV) after each token, one by one: a text that goes on."""
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


def delta_rule_solve(
    inverse: np.ndarray,
    scores: np.ndarray | None,
    qkv: np.ndarray,
    gates: np.ndarray,
    starts: np.ndarray | None,
    seq_len: int,
    key_heads: int,
    value_heads: int,
    carried: int,
    *,
    dk: int,
    dv: int,
) -> None:
    """inverse, scores (B, Hv, chunks, 64, 64): of the triangular system, and q k^T with decays.

    Behind the end of the sequence the inverse is that of 1, and scores are 0.
    """
    inverse[...] = np.eye(CHUNK, dtype=inverse.dtype)
    if scores is not None:
        scores[...] = 0
    for i, c in enumerate(_chunks(qkv, gates, starts, carried, key_heads, value_heads, dk, dv)):
        n = c.stop - c.first
        system = np.tril(c.beta[..., None] * (c.k @ _t(c.k)) * c.decays, -1)
        inverse[:, :, i, :n, :n] = np.linalg.inv(system + np.eye(n, dtype=system.dtype))
        if scores is not None:
            scores[:, :, i, :n, :n] = (c.q @ _t(c.k)) * c.decays


def delta_rule_scan(
    out: np.ndarray | None,
    states: np.ndarray | None,
    changes: np.ndarray | None,
    state: np.ndarray | None,
    qkv: np.ndarray,
    gates: np.ndarray,
    inverse: np.ndarray,
    scores: np.ndarray | None,
    starts: np.ndarray | None,
    seq_len: int,
    key_heads: int,
    value_heads: int,
    *,
    dk: int,
    dv: int,
) -> None:
    """From chunk to chunk: out, and the states in front of chunks with the changes in them.

    state: in front of the first chunk, then behind the last one; None: it is 0 in front.
    """
    B = qkv.shape[0]
    S = np.zeros((B, value_heads, dk, dv), inverse.dtype) if state is None else state.copy()
    carried = int(state is not None)
    for i, c in enumerate(_chunks(qkv, gates, starts, carried, key_heads, value_heads, dk, dv)):
        n = c.stop - c.first
        rest = c.v - c.from_state[..., None] * (c.k @ S)
        change = inverse[:, :, i, :n, :n] @ (c.beta[..., None] * rest)
        if changes is not None:
            states[:, :, i] = S
            changes[:, c.first : c.stop] = change.swapaxes(1, 2)
        if out is not None:
            o = c.from_state[..., None] * (c.q @ S) + scores[:, :, i, :n, :n] @ change
            o = o.swapaxes(1, 2).reshape(B, n, value_heads * dv)
            out[:, c.first : c.stop] = o.astype(out.dtype, copy=False)
        S = c.whole[..., None, None] * S + _t(c.to_state[..., None] * c.k) @ change
    if state is not None:
        state[...] = S


def delta_rule_scan_backward(
    d_rests: np.ndarray,
    d_states: np.ndarray,
    d_state: np.ndarray | None,
    d_out: np.ndarray,
    qkv: np.ndarray,
    gates: np.ndarray,
    inverse: np.ndarray,
    scores: np.ndarray,
    starts: np.ndarray | None,
    seq_len: int,
    key_heads: int,
    value_heads: int,
    carried: int,
    *,
    dk: int,
    dv: int,
) -> None:
    """From the last chunk to the first: gradients of the states behind chunks, and of what the
    triangular system is solved for (d_rests, as changes).

    d_state: of the state behind the last chunk, then of that in front of the first; None: it is 0.
    """
    B, T, _ = qkv.shape
    d_out = compute(d_out).reshape(B, T, value_heads, dv).swapaxes(1, 2)
    chunks = _chunks(qkv, gates, starts, carried, key_heads, value_heads, dk, dv)
    dS = np.zeros((B, value_heads, dk, dv), inverse.dtype) if d_state is None else d_state.copy()
    for i, c in reversed(list(enumerate(chunks))):
        n, d_o = c.stop - c.first, d_out[:, :, c.first : c.stop]
        d_states[:, :, i] = dS
        d_change = _t(scores[:, :, i, :n, :n]) @ d_o + c.to_state[..., None] * (c.k @ dS)
        d_rest = _t(inverse[:, :, i, :n, :n]) @ d_change
        d_rests[:, c.first : c.stop] = d_rest.swapaxes(1, 2)
        dS = c.whole[..., None, None] * dS + _t(c.from_state[..., None] * c.q) @ d_o
        dS -= _t((c.beta * c.from_state)[..., None] * c.k) @ d_rest
    if d_state is not None:
        d_state[...] = dS


def delta_rule_gradients(
    d_qkv: np.ndarray,
    d_gates: np.ndarray,
    d_out: np.ndarray,
    changes: np.ndarray,
    d_rests: np.ndarray,
    states: np.ndarray,
    d_states: np.ndarray,
    qkv: np.ndarray,
    gates: np.ndarray,
    starts: np.ndarray | None,
    seq_len: int,
    key_heads: int,
    value_heads: int,
    carried: int,
    *,
    dk: int,
    dv: int,
) -> None:
    """The gradients of queries, keys, values, decays and betas, of each chunk alone."""
    B, T, _ = qkv.shape
    d_out = compute(d_out).reshape(B, T, value_heads, dv).swapaxes(1, 2)
    d_q, d_k, d_v = heads_of(d_qkv, key_heads, value_heads, dk, dv)
    scale = changes.dtype.type(dk**-0.5)
    for i, c in enumerate(_chunks(qkv, gates, starts, carried, key_heads, value_heads, dk, dv)):
        at, d_o = slice(c.first, c.stop), d_out[:, :, c.first : c.stop]
        change, d_rest = (x[:, at].swapaxes(1, 2) for x in (changes, d_rests))
        S, dS = states[:, :, i], d_states[:, :, i]
        beta, from_state = c.beta[..., None], c.from_state[..., None]
        d_scores = (d_o @ _t(change)) * c.decays
        d_system = np.tril(-(d_rest @ _t(change)) * c.decays, -1)
        kk, qk = c.k @ _t(c.k), c.q @ _t(c.k)
        by_o, by_rest = d_o @ _t(S), d_rest @ _t(S)
        by_change = c.to_state[..., None] * (change @ _t(dS))
        d_beta = (d_rest * c.v).sum(-1) - c.from_state * (by_rest * c.k).sum(-1)
        d_beta += (d_system * kk).sum(-1)
        d_q_ = d_scores @ c.k + from_state * by_o
        d_k_ = _t(d_scores) @ c.q + by_change - beta * from_state * by_rest
        d_k_ += (beta * d_system) @ c.k + _t(beta * d_system) @ c.k
        # Sums of decays: in D, from the state in front, to the state behind.
        inner = np.tril(d_scores * qk + beta * d_system * kk, -1)
        d_sums = inner.sum(-1) - inner.sum(-2)
        d_sums += c.from_state * ((by_o * c.q).sum(-1) - c.beta * (by_rest * c.k).sum(-1))
        to_state = (by_change * c.k).sum(-1)
        d_sums -= to_state
        d_sums[:, :, -1] += to_state.sum(-1) + c.whole * (S * dS).sum((-1, -2))
        follow = _t(c.same)[:, None] & ~c.begins[:, None, :, None]
        d_decay = (follow * d_sums[:, :, None]).sum(-1)
        for target, value in zip((0, 1), (d_decay, d_beta), strict=True):
            d_gates[:, at, target] = value.swapaxes(1, 2)
        d_v[:, at] = (beta * d_rest).swapaxes(1, 2).astype(d_v.dtype, copy=False)
        of_length = ((d_q, d_q_ * scale, c.q / scale, c.q_length), (d_k, d_k_, c.k, c.k_length))
        for target, d_unit, unit, length in of_length:
            n = c.stop - c.first
            d_unit, unit, length = (
                x.reshape(B, key_heads, -1, n, x.shape[-1]) for x in (d_unit, unit, length)
            )
            d_unit, unit, length = d_unit.sum(2), unit[:, :, 0], length[:, :, 0]
            raw = length * (d_unit - unit * (unit * d_unit).sum(-1, keepdims=True))
            target[:, at] = raw.swapaxes(1, 2).astype(target.dtype, copy=False)
