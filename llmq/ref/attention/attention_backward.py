"""Reference of attention's backward with warpgroup matrix products
(llmq/cu/attention/attention_backward.cu).

For each head, a block of 64 queries is multiplied by the keys up to the end of the block.
"""

import numpy as np

from llmq.ref.common import compute

ROWS = 64  # queries per block of statistics
LOG2E = np.float32(np.log2(np.e))

# (B, T, Hq, Hkv, Hd), see llmq/ref/attention/attention.py.
CASES = {
    "one_step": (2, 64, 2, 1, 64),
    "tiles": (1, 320, 4, 2, 64),
    "heads_128": (2, 192, 2, 1, 128),
    "group": (2, 192, 6, 2, 128),
    "parts": (1, 128, 7, 1, 64),
    "qwen05b": (32, 1024, 14, 2, 64),
    "qwen05b_4k": (8, 4096, 14, 2, 64),
    "qwen15b": (32, 1024, 12, 2, 128),
    "qwen7b": (16, 1024, 28, 4, 128),
    "qwen7b_4": (4, 1024, 28, 4, 128),
    "qwen7b_1": (1, 1024, 28, 4, 128),
    "qwen15b_4": (4, 1024, 12, 2, 128),
    "qwen15b_16k": (1, 16384, 12, 2, 128),
    "qwen15b_32k": (1, 32768, 12, 2, 128),
}


def attention_statistics(statistics, taken, d_out, out, lse, counts, seq_len, num_heads):
    """statistics (B, Hq, T / 64, 2, 64) = (lse * log2(e), -(sum of d_out * out over Hd)). lse: F32
    (B, Hq, T); d_out, out: (B, T, Hq, Hd). taken: I32 (counts,), set to 0."""
    delta = np.einsum("bthd,bthd->bht", compute(d_out), compute(out))
    blocks = (*lse.shape[:2], seq_len // ROWS, ROWS)
    statistics[..., 0, :] = (lse * LOG2E).reshape(blocks)
    statistics[..., 1, :] = -delta.reshape(blocks)
    taken[...] = 0


def attention_gradient(
    d_qkv, d_out, statistics, qkv, taken, sums, part_heads, batches, seq_len, num_heads,
    num_kv_heads, scale, scale_log2,
):  # fmt: skip
    """The whole gradient d_qkv. d_qkv, qkv: (B * T, (Hq + 2 Hkv) * Hd); d_out: (B * T, Hq * Hd);
    statistics: from attention_statistics. scale: the factor of scores. taken, sums and part_heads,
    by which the kernel divides its work, and scale_log2 are not used here."""
    heads = num_heads + 2 * num_kv_heads
    for b in range(batches):
        rows = slice(b * seq_len, (b + 1) * seq_len)
        x = compute(qkv[rows]).reshape(seq_len, heads, -1)
        d_o = compute(d_out[rows]).reshape(seq_len, num_heads, -1)
        d_x = np.zeros_like(x)
        for head in range(num_heads):
            key = num_heads + head // (num_heads // num_kv_heads)
            its = [head, key, key + num_kv_heads]
            sums = _head(*x[:, its].swapaxes(0, 1), d_o[:, head], statistics[b, head], scale)
            d_x[:, its] += np.stack(sums, axis=1)
        d_qkv[rows] = d_x.reshape(seq_len, -1)


def _head(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_o: np.ndarray,
    statistics: np.ndarray,
    scale: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """d_q, d_k, d_v of one query head. statistics: (T / 64, 2, 64); all other arrays: (T, Hd)."""
    d_q, d_k, d_v = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = np.float32(scale)
    for block, (lse, minus_delta) in enumerate(statistics):
        mine, seen = slice(block * ROWS, (block + 1) * ROWS), slice((block + 1) * ROWS)
        p = np.exp2(q[mine] @ k[seen].T * (scale * LOG2E) - lse[:, None])
        p = np.tril(p, block * ROWS)
        d_v[seen] += p.T @ d_o[mine]
        p *= d_o[mine] @ v[seen].T + minus_delta[:, None]  # now the gradient of the scores
        p *= scale
        d_q[mine] = p @ k[seen]
        d_k[seen] += p.T @ q[mine]
    return d_q, d_k, d_v
