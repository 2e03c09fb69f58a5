"""Reference of the rotary position embedding."""

import numpy as np

from llmq.ref.common import compute, emit_fp8, turn_heads, update_abs_max

# name: (B, T, Hq, Hkv, Hd)
CASES = {
    "one_token": (1, 1, 1, 1, 64),
    "head_2": (2, 5, 4, 2, 2),
    "head_6": (3, 20, 4, 2, 6),
    "head_64": (2, 5, 4, 2, 64),
    "head_80": (1, 7, 3, 1, 80),
    "head_96": (1, 3, 5, 5, 96),
    "head_128": (3, 4, 6, 2, 128),
    "tiles_16": (16, 9, 5, 2, 16),
    "rows_of_no_16": (3, 20, 2, 1, 64),
    "tiles_64": (3, 80, 3, 1, 64),
    "tiles_80": (1, 144, 2, 1, 80),
    "tiles_128": (1, 160, 3, 1, 128),
    "tiles_256": (1, 144, 2, 1, 256),
    "head_512": (1, 5, 2, 1, 512),
    "qwen05b": (32, 1024, 14, 2, 64),
    "qwen15b": (32, 1024, 12, 2, 128),
    "qwen7b": (16, 1024, 28, 4, 128),
}

TILE_ROWS = 64  # rows per partial sum


def rope_forward(
    qkv, table, tokens, seq_length, num_heads, num_kv_heads, starts=None, lengths=None, *,
    rotary=None,
):  # fmt: skip
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the pairs (d, d + rotary/2), in place.
    lengths: factor of query heads at each position, or None."""
    turn_heads(qkv, table, num_heads, num_kv_heads, starts, 1, rotary, lengths)


def rope_backward(
    d_qkv, table, tokens, seq_length, num_heads, num_kv_heads, starts=None, lengths=None,
    abs_max=None, *,
    rotary=None,
):  # fmt: skip
    """Rotate by the opposite angles, in place."""
    turn_heads(d_qkv, table, num_heads, num_kv_heads, starts, -1, rotary, lengths)
    update_abs_max(abs_max, d_qkv)


def rope_backward_fused(
    out, d_qkv, partial, table, tokens, seq_length, num_heads, num_kv_heads, starts, lengths,
    block_tiles, abs_max, codes, transposed, scale, saturated, *, rotary=None,
):  # fmt: skip
    """rope_backward, with the FP8 codes and the column sums of its result. out: d_qkv, or None:
    d_qkv stays unchanged."""
    if out is None:
        out = d_qkv.copy()
    sizes = (tokens, seq_length, num_heads, num_kv_heads)
    rope_backward(out, table, *sizes, starts, lengths, abs_max, rotary=rotary)
    rows = out.reshape(tokens, -1)
    emit_fp8(codes, transposed, scale, saturated, rows)
    if partial is not None:
        for first, sums in zip(range(0, tokens, TILE_ROWS), partial, strict=True):
            np.add.reduce(compute(rows[first : first + TILE_ROWS]), axis=0, out=sums)
