"""Attention's backward in the steps of llmq/cu/attention_backward.cu: see llmq/ref/attention.py."""

from __future__ import annotations

import numpy as np

from llmq.ref.attention import attention_backward_tiles, attention_delta

ROWS = 64  # queries whose statistics lie together
LOG2E = np.float32(np.log2(np.e))

# (B, T, Hq, Hkv, Hd), see llmq/ref/attention.py.
CASES = {
    "one_step": (2, 64, 2, 1, 64),
    "tiles": (1, 320, 4, 2, 64),
    "heads_128": (2, 192, 2, 1, 128),
    "qwen05b": (32, 1024, 14, 2, 64),
    "qwen15b": (32, 1024, 12, 2, 128),
    "qwen15b_32k": (1, 32768, 12, 2, 128),
}


def attention_statistics(
    statistics: np.ndarray,
    taken: np.ndarray,
    d_out: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    seq_len: int,
    num_heads: int,
) -> None:
    """statistics (B, Hq, T / 64, 2, 64) = lse * log2(e), minus the sum of d_out * out over Hd.

    lse: F32 (B, Hq, T); d_out, out: (B, T, Hq, Hd). taken: I32 (1,), becomes 0.
    """
    delta = np.empty(lse.shape, np.float32)
    attention_delta(delta, d_out, out, seq_len, num_heads)
    blocks = (*lse.shape[:2], seq_len // ROWS, ROWS)
    statistics[..., 0, :] = (lse * LOG2E).reshape(blocks)
    statistics[..., 1, :] = -delta.reshape(blocks)
    taken[...] = 0


def attention_gradient(
    d_qkv: np.ndarray,
    d_out: np.ndarray,
    statistics: np.ndarray,
    qkv: np.ndarray,
    taken: np.ndarray,
    batches: int,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """The whole gradient d_qkv. d_qkv, qkv: (B * T, (Hq + 2 Hkv) * Hd); d_out: (B * T, Hq * Hd);
    statistics, taken: of attention_statistics; taken is not used here."""
    shape = (batches, num_heads, seq_len)
    lse = (statistics[..., 0, :] / LOG2E).reshape(shape)
    delta = -statistics[..., 1, :].reshape(shape)
    rows = (batches, seq_len)
    heads = (*rows, num_heads + 2 * num_kv_heads, -1)
    d_x = d_qkv.reshape(heads)  # a view
    sizes = (seq_len, num_heads, num_kv_heads)
    d_out = d_out.reshape(*rows, num_heads, -1)
    attention_backward_tiles(d_x, d_out, lse, delta, qkv.reshape(heads), *sizes, None, seq_len)
