"""References of cu/quantize/quantize_int8.cu: signed bytes with a scale for each row or column."""

import numpy as np

from llmq.base.dtypes import I8_MAX
from llmq.ref.common import compute, mix_seed, random_bits, row_blocks, step_scalars

# rows, columns
CASES = {
    "smallest": (16, 16),
    "one_tile": (128, 64),
    "ragged": (144, 80),
    "several_warps": (16, 2320),
    "sixteen_warps": (16, 9008),
    "tall": (400, 48),
    "few_rows": (4, 32),
    "rows_of_no_16": (148, 80),
    "qwen05b": (32 * 1024, 896),
    "qwen05b_d_up_gate": (32 * 1024, 9728),
    "qwen15b": (32 * 1024, 1536),
    "qwen15b_mlp": (32 * 1024, 8960),
    "qwen15b_weight": (17920, 1536),
}

LEAST_ABS_MAX = np.float32(1e-30)  # gives rows of zeros a finite factor


def _scales(largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales, and the factors that x is multiplied by. Where the largest value is not
    finite, the scale is NaN and the factor 0."""
    finite = np.isfinite(largest)
    scale = np.maximum(np.where(finite, largest, 0), LEAST_ABS_MAX) / np.float32(I8_MAX)
    factor = np.where(finite, np.float32(1) / scale, np.float32(0))
    return np.where(finite, scale, np.float32(np.nan)), factor


def _random(scalars: np.ndarray, salt: int, sequence: int, rows: slice, cols: int) -> np.ndarray:
    """Random numbers F32 (rows, cols) in [0, 1) with 16 bits. The number of an element is the same
    whichever rank has the sequence."""
    s = step_scalars(scalars)
    seed = mix_seed(int(s["seed"]), int(s["step"]), salt)
    row = np.arange(rows.start, rows.stop, dtype=np.uint64)
    number, token = row // np.uint64(sequence), row % np.uint64(sequence)
    number = np.uint64(s["first_sequence"]) + number * np.uint64(s["sequence_stride"])
    start = (number * np.uint64(sequence) + token) * np.uint64(cols)
    pairs = (start[:, None] + np.arange(0, cols, 2, dtype=np.uint64)) >> np.uint64(1)
    bits = random_bits(seed, pairs)
    halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], axis=-1)
    return halves.reshape(len(row), cols).astype(np.float32) * np.float32(2**-16)


def _codes(x: np.ndarray, factor: np.ndarray, uniform: np.ndarray | None) -> np.ndarray:
    """Return x * factor as int8, rounded to nearest even; or, with random numbers `uniform` in [0,
    1), rounded stochastically."""
    with np.errstate(invalid="ignore", over="ignore"):
        v = np.where(factor == 0, np.float32(0), x * factor)
    if uniform is None:
        return np.rint(v).astype(np.int8)
    return np.floor(v + uniform).clip(-I8_MAX, I8_MAX).astype(np.int8)


def quantize_int8_rows(q, scale, x, factors, scalars, salt, sequence, rows, cols):
    """q = y / scale, with y = x [* factors] and each row's scale = the row's largest |y| / 127."""
    for block in row_blocks(rows, cols):
        y = x[block].astype(np.float32, copy=False)
        if factors is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                y = y * factors
        scale[block], factor = _scales(np.maximum(y.max(axis=1), -y.min(axis=1)))
        uniform = None if scalars is None else _random(scalars, salt, sequence, block, cols)
        q[block] = _codes(y, factor[:, None], uniform)


def quantize_int8_column_max(column_max, x, rows, cols):
    """column_max = max(column_max, the largest |x| of each column); NaN counts as the largest."""
    for block in row_blocks(rows, cols):
        y = x[block].astype(np.float32, copy=False)
        largest = np.maximum(y.max(axis=0), -y.min(axis=0))
        np.maximum(column_max, np.abs(largest), out=column_max)


def quantize_int8_columns(q_t, scale, x, column_max, scalars, salt, sequence, rows, cols):
    """q_t = the transpose of x / scale, with each column's scale = column_max / 127."""
    scale[...], factor = _scales(column_max)
    for block in row_blocks(rows, cols):
        y = x[block].astype(np.float32, copy=False)
        uniform = None if scalars is None else _random(scalars, salt, sequence, block, cols)
        q_t[:, block] = _codes(y, factor, uniform).T
    q_t[:, rows:] = 0


def quantize_int8_decode(out, q, scale, rows, cols):
    """out = q * the row's scale."""
    for block in row_blocks(rows, cols):
        out[block] = q[block].astype(np.float32) * scale[block, None]


# -- Columns for which signed bytes are too coarse

# rows, columns, rows of the weight
OUTLIERS_CASES = {
    "smallest": (16, 16, 16),
    "ragged": (48, 208, 80),
    "wide": (16, 4112, 32),
    "qwen7b_up": (4096, 3584, 37888),
    "qwen7b_down": (4096, 18944, 3584),
}


def outliers_select(mask, index, column_max, threshold, most, cols):
    """Write index (most,), the columns whose largest |x| is above a limit, in order, then -1; and
    mask, 0 for these columns, 1 for others. The limit is the threshold; or, if more than `most`
    columns are above the threshold, the least limit that at most `most` columns exceed. NaN is
    above every limit."""
    bits = np.abs(column_max).view(np.uint32)
    limit = np.float32(threshold).reshape(1).view(np.uint32)[0]
    ordered = np.sort(bits)[::-1]
    if cols > most:
        limit = max(limit, ordered[most])
    chosen = np.flatnonzero(bits > limit)
    index[...] = -1
    index[: len(chosen)] = chosen
    mask[...] = 1
    mask[chosen] = 0


def outliers_take(out, x, index, rows, cols, most):
    """out (rows, most) = the columns of x in index; 0 where index is -1."""
    out[...] = 0
    chosen = index[index >= 0]
    out[:, : len(chosen)] = x[:, chosen]


def outliers_weight(out, q, scale, index, rows, cols, most):
    """out (rows, most) = q * the row's scale for the columns in index; 0 where index is -1."""
    out[...] = 0
    chosen = index[index >= 0]
    out[:, : len(chosen)] = compute(q[:, chosen]) * scale[:, None]
