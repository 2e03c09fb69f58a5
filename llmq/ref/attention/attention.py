"""Causal self-attention with grouped key/value heads: reference of llmq/cu/attention/attention.cu.

Documents are computed one by one, as if each were a sequence of its own. A block of ROWS queries is
multiplied by the keys that at least one of its queries sees, so that no block above the diagonal is
computed. The heads that share a key/value head are stacked into one matrix. A column of ones in an
operand makes the matrix products give row sums and add offsets.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from llmq.ref.common import compute

# (B, T, Hq, Hkv, Hd); sizes of models are for benchmarks, too large for the emulator.
CASES = {
    "one_position": (2, 1, 2, 1, 64),
    "ragged": (2, 37, 4, 2, 64),
    "heads_6": (2, 37, 4, 2, 6),
    "heads_20": (1, 70, 3, 1, 20),
    "heads_129": (1, 33, 2, 1, 129),
    "two_tiles": (1, 150, 2, 2, 64),
    "gqa_80": (1, 70, 6, 2, 80),
    "heads_96": (1, 33, 3, 1, 96),
    "heads_128": (1, 100, 2, 1, 128),
    "heads_256": (1, 70, 2, 1, 256),
    "heads_512": (1, 70, 2, 1, 512),
    "qwen05b": (32, 1024, 14, 2, 64),
    "qwen15b": (32, 1024, 12, 2, 128),
    "qwen7b": (16, 1024, 28, 4, 128),
    "qwen15b_32k": (1, 32768, 12, 2, 128),
    "gemma4_local": (4, 2048, 16, 8, 256),
    "gemma4_global": (4, 2048, 16, 2, 512),
    "glm47_flash": (2, 4096, 20, 20, 256),
}

ROWS = 64  # query positions in one block
TILE = 1 << 18  # about the scores per block: the batch is cut so that scores stay in the cache


def _parts(
    qkv: np.ndarray, num_heads: int, starts: np.ndarray | None
) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and positions that do not see each other: documents, if there are starts,
    else whole sequences, as many at once as give blocks of about TILE scores."""
    batch, seq_len = qkv.shape[:2]
    if starts is None:
        step = max(1, TILE // (num_heads * min(ROWS, seq_len) * seq_len))
        for b in range(0, batch, step):
            yield slice(b, min(b + step, batch)), slice(0, seq_len)
        return
    for b, row in enumerate(starts):
        edges = [0, *(np.flatnonzero(np.diff(row)) + 1), seq_len]
        for first, end in pairwise(edges):
            yield slice(b, b + 1), slice(first, end)


def _stack(x: np.ndarray, num_kv_heads: int, last: np.ndarray | float) -> np.ndarray:
    """(B, rows, H, Hd) -> (B, Hkv, H/Hkv * rows, Hd + 1). last: the values of the last column."""
    batch, rows, heads, head_dim = x.shape
    group = heads // num_kv_heads
    out = np.empty((batch, num_kv_heads, group, rows, head_dim + 1), x.dtype)
    out[..., :-1] = x.reshape(batch, rows, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    out[..., -1] = last
    return out.reshape(batch, num_kv_heads, group * rows, head_dim + 1)


def _unstack(x: np.ndarray, rows: int) -> np.ndarray:
    """(B, Hkv, G * rows, n) -> (B, rows, Hkv * G, n), a view or a copy."""
    batch, kv_heads, stacked, n = x.shape
    x = x.reshape(batch, kv_heads, stacked // rows, rows, n).transpose(0, 3, 1, 2, 4)
    return x.reshape(batch, rows, -1, n)


def _mask(scores: np.ndarray, rows: int, window: int) -> None:
    """Set scores of unseen keys to -inf. scores: (B, Hkv, G * rows, keys); the last key has the
    position of the last row. Each row sees `window` keys up to its own position."""
    batch, kv_heads, stacked, keys = scores.shape
    blocks = scores.reshape(batch, kv_heads, stacked // rows, rows, keys)
    blocks[..., keys - rows :] += np.triu(np.full((rows, rows), -np.inf, scores.dtype), 1)
    past = keys - window  # number of first keys that the last row does not see
    if past > 0:
        blocks[..., :past] += np.tril(np.full((rows, past), -np.inf, scores.dtype), past - rows)


def _capped(scores: np.ndarray, softcap: int | None) -> np.ndarray:
    """softcap * tanh(scores / softcap), or scores without a cap."""
    return softcap * np.tanh(scores / softcap) if softcap else scores


def attention_forward(
    out, lse, qkv, seq_len, num_heads, num_kv_heads, starts, window, scale, workspace=None, *,
    softcap=None,
):  # fmt: skip
    """out = softmax(scale * q k^T, causal) v, lse = log of the softmax's denominator. out: (B, T,
    Hq, Hd); lse: F32 (B, Hq, T), natural logarithm; qkv: (B, T, Hq + 2 Hkv, Hd); starts: I32 (B,
    T), first position of each token's document, or None; window: number of keys that a query sees,
    its own included. workspace: for the cuDNN kernel, unused here."""
    for batch, part in _parts(qkv, num_heads, starts):
        x, part_out, part_lse = compute(qkv[batch, part]), out[batch, part], lse[batch, :, part]
        q, k, v = np.split(x, (num_heads, num_heads + num_kv_heads), axis=2)
        keys = np.ascontiguousarray(k.transpose(0, 2, 3, 1))
        values = _stack(v, num_kv_heads, 1)
        for start, end, first in _blocks(x.shape[1], window):
            queries = _stack(q[:, start:end], num_kv_heads, 0)[..., :-1]
            queries *= scale
            scores = _capped(queries @ keys[..., first:end], softcap)
            _mask(scores, end - start, window)
            row_max = scores.max(axis=-1, keepdims=True)
            scores -= row_max
            np.exp(scores, out=scores)
            product = _unstack(scores @ values[:, :, first:end], end - start)
            total = product[..., -1:]
            part_out[:, start:end] = product[..., :-1] / total
            row_lse = _unstack(row_max, end - start) + np.log(total)
            part_lse[:, :, start:end] = row_lse[..., 0].transpose(0, 2, 1)


def _blocks(seq_len: int, window: int) -> Iterator[tuple[int, int, int]]:
    """First and last (excluded) query of each block, and the first key that the block sees."""
    for start in range(0, seq_len, ROWS):
        yield start, min(start + ROWS, seq_len), max(0, start - window + 1)


def attention_delta(delta, d_out, out, seq_len, num_heads):
    """delta = sum of d_out * out over Hd. delta: F32 (B, Hq, T); d_out, out: (B, T, Hq, Hd)."""
    delta[...] = np.einsum("bthd,bthd->bht", compute(d_out), compute(out))


def attention_backward_tiles(
    d_qkv, d_out, lse, delta, qkv, seq_len, num_heads, num_kv_heads, starts, window, scale, *,
    softcap=None,
):  # fmt: skip
    """The whole gradient d_qkv; probabilities are recomputed from lse. The other arguments are
    attention_forward's; delta: attention_delta's."""
    for batch, part in _parts(qkv, num_heads, starts):
        x, d_o, d_x = compute(qkv[batch, part]), compute(d_out[batch, part]), d_qkv[batch, part]
        q, k, v = np.split(x, (num_heads, num_heads + num_kv_heads), axis=2)
        keys, values = _stack(k, num_kv_heads, 1), _stack(v, num_kv_heads, 1)
        d_keys, d_values = np.zeros_like(keys[..., :-1]), np.zeros_like(values[..., :-1])
        grouped = (len(x), num_kv_heads, num_heads // num_kv_heads, -1)
        for start, end, first in _blocks(x.shape[1], window):
            rows, seen = slice(part.start + start, part.start + end), slice(first, end)
            row_lse = lse[batch, :, rows].reshape(grouped)
            row_delta = delta[batch, :, rows].reshape(grouped)
            queries = _stack(q[:, start:end] * scale, num_kv_heads, -row_lse)
            d_outs = _stack(d_o[:, start:end], num_kv_heads, -row_delta)
            probs, slope = queries @ keys[:, :, seen].swapaxes(2, 3), None
            if softcap:
                capped = _capped(probs - queries[..., -1:], softcap)
                slope = 1 - np.square(capped / softcap)
                probs = capped + queries[..., -1:]
            _mask(probs, end - start, window)
            np.exp(probs, out=probs)
            d_values[:, :, seen] += probs.swapaxes(2, 3) @ d_outs[..., :-1]
            probs *= d_outs @ values[:, :, seen].swapaxes(2, 3)  # now the gradient of the scores
            if slope is not None:
                probs *= slope
            d_keys[:, :, seen] += probs.swapaxes(2, 3) @ queries[..., :-1]
            d_queries = probs @ keys[:, :, seen, :-1]
            d_queries *= scale
            d_x[:, start:end, :num_heads] = _unstack(d_queries, end - start)
        d_x[:, :, num_heads : num_heads + num_kv_heads] = d_keys.transpose(0, 2, 1, 3)
        d_x[:, :, num_heads + num_kv_heads :] = d_values.transpose(0, 2, 1, 3)


def attention_backward(
    d_qkv, d_kv, d_out, out, lse, qkv, workspace, deterministic, parts, seq_len, num_heads,
    num_kv_heads, starts, window, scale,
):  # fmt: skip
    """d_qkv in one call, as cuDNN computes it. workspace, parts: cuDNN's memory and number of
    calls, not used here. d_out, out: (B, T, Hq, Hd); lse: F32 (B, Hq, T); d_qkv, qkv: (B, T, Hq + 2
    Hkv, Hd). d_kv: (2, Hq, T, Hd), for a batch of 1, or None: each query head's share of the
    gradients of keys and of values, which then do not go to d_qkv."""
    delta = np.empty(lse.shape, compute(qkv).dtype)
    attention_delta(delta, d_out, out, seq_len, num_heads)
    if d_kv is None:
        sizes = (seq_len, num_heads, num_kv_heads)
        attention_backward_tiles(d_qkv, d_out, lse, delta, qkv, *sizes, starts, window, scale)
        return
    for head in range(num_heads):
        kv_head, mine = head // (num_heads // num_kv_heads), slice(head, head + 1)
        its = [head, num_heads + kv_head, num_heads + num_kv_heads + kv_head]
        d_its, one = np.empty_like(qkv[:, :, its]), (d_out[:, :, mine], lse[:, mine])
        sizes = (delta[:, mine], qkv[:, :, its], seq_len, 1, 1)
        attention_backward_tiles(d_its, *one, *sizes, starts, window, scale)
        d_qkv[:, :, head], d_kv[0, head], d_kv[1, head] = np.moveaxis(d_its[0], 1, 0)


def attention_sum_heads(d_qkv, d_kv, seq_len, num_heads, num_kv_heads):
    """Key and value heads of d_qkv (1, T, Hq + 2 Hkv, Hd) = sums of d_kv (2, Hq, T, Hd) over the
    query heads that share the key/value head, in their order."""
    each = compute(d_kv).reshape(2 * num_kv_heads, -1, *d_kv.shape[2:])
    total = each[:, 0].copy()
    for head in range(1, each.shape[1]):
        total += each[:, head]
    d_qkv[0, :, num_heads:] = total.transpose(1, 0, 2)
