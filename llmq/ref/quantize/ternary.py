"""References of cu/quantize/ternary.cu: weights as -1, 0 and 1 with one scale for each module (Ma
et al., "The Era of 1-bit LLMs", 2024: absolute mean)."""

import numpy as np

from llmq.ref.common import compute, row_blocks

# rows, columns
CASES = {
    "smallest": (16, 16),
    "ragged": (48, 272),
    "many_rows": (1040, 16),
    "qwen05b_up": (9728, 896),
    "qwen15b_down": (1536, 8960),
}

LEAST_MEAN = np.float32(1e-5)  # gives modules of zeros a finite factor


def ternary_sums(sums, w, rows, cols):
    """sums = the sum of each row's |w|."""
    for block in row_blocks(rows, cols):
        sums[block] = np.abs(compute(w[block])).sum(axis=1)


def ternary_scales(scale, sums, rows, cols):
    """scale = the mean |w| of the whole module, in every row."""
    mean = np.float32(sums.sum(dtype=np.float64) / (rows * cols))
    scale[...] = np.maximum(mean, LEAST_MEAN)


def ternary_codes(q, w, scale, rows, cols):
    """q = w / the row's scale, rounded to the nearest of -1, 0 and 1."""
    for block in row_blocks(rows, cols):
        v = compute(w[block]) * (np.float32(1) / scale[block, None])
        q[block] = (v > 0.5).astype(np.int8) - (v < -0.5)


def ternary_round(out, w, scale, rows, cols):
    """out = the code of w times the row's scale."""
    for block in row_blocks(rows, cols):
        v = compute(w[block]) * (np.float32(1) / scale[block, None])
        out[block] = ((v > 0.5).astype(np.float32) - (v < -0.5)) * scale[block, None]


def ternary_of(w: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """Return the codes I8 of a module's weight (rows, columns), and its scale."""
    sums, scale = np.empty(len(w), np.float32), np.empty(len(w), np.float32)
    q = np.empty(w.shape, np.int8)
    ternary_sums(sums, w, *w.shape)
    ternary_scales(scale, sums, *w.shape)
    ternary_codes(q, w, scale, *w.shape)
    return q, scale[0]
