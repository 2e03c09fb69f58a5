"""References of cu/quantize/quantize.cu: FP8 with one scale for the whole tensor."""

import numpy as np

from llmq.ref.common import FP8_MAX, emit_fp8, encode_fp8, pad_turned, row_blocks, update_abs_max

# rows, columns
CASES = {
    "smallest": (16, 16),
    "one_tile": (128, 64),
    "ragged": (144, 80),
    "wide": (16, 720),
    "few_rows": (4, 32),
    "rows_of_no_16": (148, 80),
    "tall": (400, 48),
    "qwen05b": (32 * 1024, 896),
    "qwen05b_mlp": (32 * 1024, 4864),
    "qwen05b_d_up_gate": (32 * 1024, 9728),
    "qwen05b_weight": (9728, 896),
    "qwen15b": (32 * 1024, 1536),
    "qwen15b_mlp": (32 * 1024, 8960),
}

LEAST_ABS_MAX = np.float32(1e-10)  # gives tensors of zeros a finite factor


def _factor(scale: np.ndarray, abs_max: np.ndarray, dtype: np.dtype) -> np.float32:
    """Write the scale; return 1 / scale, which x is multiplied by."""
    finite = np.isfinite(abs_max[0])
    scale[0] = max(abs_max[0], LEAST_ABS_MAX) / FP8_MAX[dtype] if finite else np.nan
    return np.float32(1) / scale[0]


def quantize(q, scale, x, abs_max, n):
    """q = x / scale, scale = abs_max / the largest finite value of q's dtype."""
    factor = _factor(scale, abs_max, q.dtype)
    codes, x = q.reshape(-1).view(np.uint8), x.reshape(-1)
    for block in row_blocks(n, 1):
        encode_fp8(codes[block], x[block], factor, q.dtype)


def quantize_transpose(q, q_t, scale, x, abs_max, rows, cols):
    """Quantize like `quantize`; q_t gets the transpose of q, and q may be None."""
    factor = _factor(scale, abs_max, q_t.dtype)
    codes = np.empty(x.shape, np.uint8) if q is None else q.view(np.uint8)
    for block in row_blocks(rows, cols):
        encode_fp8(codes[block], x[block], factor, q_t.dtype)
        q_t.view(np.uint8)[:, block] = codes[block].T
    pad_turned(q_t, rows, factor)


def quantize_scaled(x, rows, cols, abs_max, *fp8):
    """Write codes of x with a given scale. fp8: codes, transposed, scale, saturated."""
    emit_fp8(*fp8, x)
    update_abs_max(abs_max, x)


def transpose_codes(q_t, q, rows, cols):
    """q_t = the transpose of q, or of each matrix in q (matrices, rows, cols)."""
    for block in row_blocks(rows, cols):
        q_t.view(np.uint8)[..., block] = q.view(np.uint8)[..., block, :].swapaxes(-1, -2)
    q_t.view(np.uint8)[..., rows:] = 0


def dequantize(out, q, scale, n):
    """out = q * scale."""
    flat, codes = out.reshape(-1), q.reshape(-1)
    for block in row_blocks(n, 1):
        flat[block] = codes[block].astype(np.float32) * scale[0]
