"""Attention through a paged cache: reference of llmq/cu/attention/paged.cu.

Sequences are computed one by one, each from its own blocks, so that no bit of a sequence depends on
its neighbours. Queries are computed in pieces of ROWS positions, as in attention_forward.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from llmq.ref.common import compute, decode_fp8, encode_fp8

# S, n, Hq, Hkv, Hd, positions per block, blocks per sequence. Benchmarks use the "qwen" cases.
CASES = {
    "mha": (3, 1, 2, 2, 64, 16, 6),
    "grouped": (4, 1, 14, 2, 64, 16, 40),
    "wide_heads": (2, 1, 8, 1, 256, 32, 10),
    "widest_heads": (2, 1, 4, 1, 512, 16, 20),
    "widest_piece": (1, 21, 3, 1, 512, 16, 4),
    "odd_heads": (2, 1, 6, 2, 72, 16, 20),
    "two_tokens": (2, 2, 3, 1, 64, 16, 3),
    "piece": (2, 37, 6, 2, 128, 32, 12),
    "long_piece": (2, 70, 10, 2, 72, 16, 24),
    "qwen05b": (1, 1, 14, 2, 64, 32, 128),
    "qwen7b": (1, 1, 28, 4, 128, 32, 1024),
    "qwen7b_batch": (64, 1, 28, 4, 128, 32, 64),
    "qwen7b_prompt": (1, 512, 28, 4, 128, 32, 128),
}

# S, n, Hq, Hd, Vd, positions per block, blocks per sequence.
LATENT_CASES = {
    "token": (3, 1, 4, 72, 64, 16, 6),
    "tokens": (2, 2, 20, 40, 24, 16, 20),
    "piece": (2, 37, 3, 576, 512, 16, 6),
    "glm47_flash": (1, 1, 20, 576, 512, 16, 2048),
}

ROWS = 64  # queries in one piece
BLOCKS = 4  # the number of key blocks of a single query is rounded up to a multiple


def paged_store(
    k_cache, v_cache, qkv, table, lengths, new, n, max_blocks, block_size, num_heads, num_kv_heads,
    scales=None,
):  # fmt: skip
    """Rows lengths[s] + [0, new[s]) of each sequence = keys and values of qkv (S, n, Hq + 2 Hkv,
    Hd). k_cache, v_cache: (blocks, block_size, Hkv, Hd), v_cache may be None; table: I32 (S,
    max_blocks); lengths, new: I32 (S,). scales, for E4M3 caches: BF16 (blocks, block_size, Hkv, 2),
    for each row the least power of two with which no code is beyond 448."""
    s, i = np.nonzero(np.arange(n) < new[:, None])
    positions, rows = lengths[s] + i, qkv[s, i, num_heads:]
    at = table[s, positions // block_size], positions % block_size
    parts = (rows[:, :num_kv_heads], rows[:, num_kv_heads:])
    for which, (cache, part) in enumerate(zip((k_cache, v_cache), parts, strict=True)):
        if cache is None:
            continue
        if scales is None:
            cache[at] = part
            continue
        x = compute(part)
        parts_of_2, exponents = np.frexp(np.abs(x).max(axis=-1))
        exponents = np.where(parts_of_2 == 0, -126, exponents)
        powers = np.maximum(exponents - 9 + (parts_of_2 > 0.875), -126)
        factors = np.ldexp(np.float32(1), powers)
        scales[(*at, slice(None), which)] = np.where(np.isfinite(parts_of_2), factors, np.nan)
        codes = np.empty(x.shape, cache.dtype)
        flat = (x / factors[..., None]).reshape(-1, x.shape[-1])
        encode_fp8(codes.reshape(flat.shape).view(np.uint8), flat, np.float32(1), cache.dtype)
        cache[at] = codes


class _Rows(NamedTuple):
    """Keys or values in a cache (blocks, block_size, Hkv, channels). scales: the factors of E4M3
    codes, or None."""

    cache: np.ndarray
    scales: np.ndarray | None

    def of(self, blocks: np.ndarray) -> np.ndarray:
        """The keys or values in these blocks, F32."""
        x = self.cache[blocks]
        if self.scales is None:
            return compute(x)
        values = decode_fp8(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        return values * compute(self.scales[blocks])[..., None]


def _rows(k_cache, v_cache, scales, channels):
    """Keys and values. v_cache None: values are the first `channels` channels of keys."""
    which = 0 if v_cache is None else 1
    values = k_cache[..., :channels] if v_cache is None else v_cache
    of = (None, None) if scales is None else (scales[..., 0], scales[..., which])
    return _Rows(k_cache, of[0]), _Rows(values, of[1])


class _Piece(NamedTuple):
    """Queries [first, end) of one sequence. scores: (Hkv, G * rows, keys), already scaled, -inf
    where a query does not see the key. values: (Hkv, keys, Hd + 1), the last column ones."""

    sequence: int
    first: int
    end: int
    scores: np.ndarray
    values: np.ndarray

    def by_query(self, x: np.ndarray) -> np.ndarray:
        """(Hkv, G * rows, columns) as (rows, Hq, columns)."""
        kv_heads, _, columns = x.shape
        x = x.reshape(kv_heads, -1, self.end - self.first, columns)
        return x.transpose(2, 0, 1, 3).reshape(self.end - self.first, -1, columns)


def _capped(scores: np.ndarray, softcap: int | None) -> np.ndarray:
    """softcap * tanh(scores / softcap), or scores without a cap."""
    return softcap * np.tanh(scores / softcap) if softcap else scores


def _pieces(
    qkv, k_cache, v_cache, table, lengths, new, block_size, num_heads, num_kv_heads, window, scale,
    softcap,
) -> Iterator[_Piece]:  # fmt: skip
    """Pieces of all sequences' new queries, sequence by sequence."""
    head_dim, group = qkv.shape[3], num_heads // num_kv_heads
    for s in np.flatnonzero(new):
        for first in range(0, int(new[s]), ROWS):
            end = min(first + ROWS, int(new[s]))
            positions = int(lengths[s]) + np.arange(first, end)
            start = max(0, int(positions[0]) + 1 - window) // block_size
            stop = int(positions[-1]) // block_size + 1
            seen = slice(0, int(positions[-1]) + 1 - start * block_size)
            blocks = table[s, start:stop]
            shape = (len(blocks) * block_size, num_kv_heads, head_dim)
            keys = k_cache.of(blocks).reshape(shape)[seen].transpose(1, 2, 0)
            values = np.ones((num_kv_heads, keys.shape[2], v_cache.cache.shape[3] + 1), keys.dtype)
            of_values = (*shape[:2], v_cache.cache.shape[3])
            found = v_cache.of(blocks).reshape(of_values)[seen]
            values[..., :-1] = found.transpose(1, 0, 2)
            queries = compute(qkv[s, first:end, :num_heads])
            queries = queries.reshape(end - first, num_kv_heads, group, head_dim)
            queries = queries.transpose(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
            scores = _capped((queries * scale) @ np.ascontiguousarray(keys), softcap)
            at = start * block_size + np.arange(keys.shape[2])
            hidden = (at > positions[:, None]) | (at <= positions[:, None] - window)
            by_head = scores.reshape(num_kv_heads, group, end - first, -1)
            by_head[..., hidden] = -np.inf
            yield _Piece(s, first, end, scores, values)


def _softmax(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row maxima, and exp(scores - maxima) @ values; scores are overwritten."""
    top = scores.max(axis=-1, keepdims=True)
    scores -= np.where(np.isneginf(top), 0, top)
    np.exp(scores, out=scores)
    return top, scores @ values


def paged_attend(
    out, qkv, k_cache, v_cache, table, lengths, new, n, max_blocks, block_size, num_heads,
    num_kv_heads, window, scale, sinks=None, scales=None, *, softcap=None,
):  # fmt: skip
    """out (S, n, Hq, Hd) = attention of query i of sequence s, at position lengths[s] + i, to the
    `window` keys of the cache up to that position; 0 from query new[s] on. qkv: (S, n, Hq + 2 Hkv,
    Hd), of which only the queries are read; sinks: (Hq,), each head's score of an extra key without
    a value, or None. Without v_cache out is (S, n, Hq, Vd), and values are the first Vd channels
    of keys. The other arguments are as in paged_store."""
    out[...] = 0
    cache = (*_rows(k_cache, v_cache, scales, out.shape[-1]), table, lengths, new)
    sizes = (block_size, num_heads, num_kv_heads, window, scale)
    if n == 1:
        _attend_tokens(out, qkv, *cache, *sizes, sinks, softcap)
        return
    for piece in _pieces(qkv, *cache, *sizes, softcap):
        top, product = _softmax(piece.scores, piece.values)
        top, product = piece.by_query(top), piece.by_query(product)
        total = product[..., -1:]
        if sinks is not None:
            total = total + np.exp(sinks[:, None] - top)
        out[piece.sequence, piece.first : piece.end] = product[..., :-1] / total


def _attend_tokens(
    out, qkv, k_cache, v_cache, table, lengths, new, block_size, num_heads, num_kv_heads, window,
    scale, sinks, softcap,
):  # fmt: skip
    """paged_attend with one query for each sequence. Sequences with equally many key blocks,
    rounded up to a multiple of BLOCKS, are computed together. NumPy computes each sequence's matrix
    products separately, so that no bit depends on other sequences."""
    rows, head_dim = np.flatnonzero(new), qkv.shape[3]
    ends = lengths[rows] // block_size
    starts = np.maximum(lengths[rows] + 1 - window, 0) // block_size
    counts = -(-(ends + 1 - starts) // BLOCKS) * BLOCKS
    for count in np.unique(counts):
        chosen = counts == count
        s, start, end = rows[chosen], starts[chosen, None], ends[chosen, None]
        blocks = np.take_along_axis(table[s], np.minimum(start + np.arange(count), end), 1)
        at, own = start * block_size + np.arange(count * block_size), lengths[s, None]
        hidden = (at > own) | (at <= own - window)
        shape = (len(s), count * block_size, num_kv_heads, head_dim)
        keys = k_cache.of(blocks).reshape(shape).transpose(0, 2, 3, 1)
        values = v_cache.of(blocks).reshape((*shape[:3], v_cache.cache.shape[3]))
        values[hidden] = 0
        queries = compute(qkv[s, 0, :num_heads]).reshape(len(s), num_kv_heads, -1, head_dim)
        scores = _capped((queries * scale) @ np.ascontiguousarray(keys), softcap)
        scores[np.broadcast_to(hidden[:, None, None], scores.shape)] = -np.inf
        top = scores.max(axis=-1, keepdims=True)
        scores -= top
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total += np.exp(compute(sinks).reshape(num_kv_heads, -1, 1) - top)
        product = scores @ np.ascontiguousarray(values.transpose(0, 2, 1, 3))
        out[s, 0] = (product / total).reshape(len(s), num_heads, -1)


def paged_decode(
    out, partial, stats, arrived, qkv, k_cache, v_cache, table, lengths, new, n, max_blocks,
    block_size, num_heads, num_kv_heads, splits, window, scale, sinks=None, stores=1, scales=None,
    *, softcap=None,
):  # fmt: skip
    """paged_store, unless stores is 0, and paged_attend. partial, stats, arrived: scratch of the
    kernel, not used here."""
    sizes = (n, max_blocks, block_size, num_heads, num_kv_heads)
    if stores:
        paged_store(k_cache, v_cache, qkv, table, lengths, new, *sizes, scales)
    cache = (k_cache, v_cache, table, lengths, new)
    paged_attend(out, qkv, *cache, *sizes, window, scale, sinks, scales, softcap=softcap)
