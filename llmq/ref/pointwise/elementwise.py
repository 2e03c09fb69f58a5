"""References of cu/pointwise/elementwise.cu."""

import numpy as np

from llmq.ref.common import compute, mix_seed, random_bits, step_scalars

CASES = {"one": (1,), "ragged": (1003,), "several_blocks": (70, 129), "qwen05b": (151936, 896)}


def add(out, a, b, n):
    """out = a + b, rounded to nearest."""
    out[...] = compute(a) + compute(b)


def scale(out, x, by, n):
    """out = x * by, rounded to nearest."""
    out[...] = compute(x) * compute(by)


def multiply(
    out, a, b, rows, channels, out_first, a_first, b_first, out_columns, a_columns, b_columns
):
    """out = a * b, rounded to nearest: `channels` columns, from out_first, a_first, b_first on."""
    x, y = a[:, a_first : a_first + channels], b[:, b_first : b_first + channels]
    out[:, out_first : out_first + channels] = compute(x) * compute(y)


def copy_columns(out, x, rows, channels, out_first, x_first, out_columns, x_columns, width, *, add):
    """out = [out +] x, rounded to nearest: `channels` columns, from out_first, x_first on."""
    to, values = (t[:, first : first + channels] for t, first in ((out, out_first), (x, x_first)))
    to[...] = compute(to) + compute(values) if add else values


def convert(out, x, n):
    """out = x in out's dtype, rounded to nearest."""
    out[...] = x


def fill(x, value, n):
    """x[i] = value for every element."""
    x[...] = value


# -- Normally distributed random numbers: Philox4x32-10 and Box-Muller

# Philox4x32-10: J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), table 2.
ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)

BLOCK = 1 << 16  # counters at a time


def philox(key: tuple[int, int], counter: np.ndarray) -> np.ndarray:
    """uint32 (4, n): four random words for each 64-bit counter."""
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1 = counter & low, counter >> high
    x2, x3 = np.zeros_like(counter), np.zeros_like(counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        product0 = x0 * MULTIPLIERS[0]
        product1 = x2 * MULTIPLIERS[1]
        x0, x1 = (product1 >> high) ^ x1 ^ np.uint64(k0), product1 & low
        x2, x3 = (product0 >> high) ^ x3 ^ np.uint64(k1), product0 & low
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3]).astype(np.uint32)


def _normals(words: np.ndarray) -> np.ndarray:
    """F32 (n, 4) standard normal numbers from uint32 (4, n), in the order of the elements."""
    # 24 bits each, exact in F32: the radius from (0, 1], the angle from [0, 1).
    unit = (words >> np.uint32(8)).astype(np.float32)
    unit[0::2] += 1
    unit *= np.float32(2.0**-24)
    radius = np.sqrt(np.float32(-2) * np.log(unit[0::2]))
    angle = 2 * np.pi * unit[1::2].astype(np.float64)  # then rounded once, as CUDA's sincospif
    out = np.empty((words.shape[1], 4), np.float32)
    np.multiply(radius.T, np.cos(angle).astype(np.float32).T, out=out[:, 0::2])
    np.multiply(radius.T, np.sin(angle).astype(np.float32).T, out=out[:, 1::2])
    return out


def random_normal(out, std, seed_low, seed_high, first_index, n):
    """out[i] ~ N(0, std^2), a function of the seed and first_index + i alone."""
    flat = out.reshape(-1)
    end = first_index + n
    for start in range(first_index // 4, -(-end // 4), BLOCK):
        stop = min(start + BLOCK, -(-end // 4))
        words = philox((seed_low, seed_high), np.arange(start, stop, dtype=np.uint64))
        values = _normals(words).reshape(-1) * np.float32(std)
        low, high = max(4 * start, first_index), min(4 * stop, end)
        flat[low - first_index : high - first_index] = values[low - 4 * start : high - 4 * start]


# -- Dropout

# name: (sequences, elements per sequence)
DROPOUT_CASES = {"one": (1, 8), "ragged": (3, 1000), "blocks": (2, 5000), "qwen7b": (4, 3670016)}


def dropout(out, x, scalars, threshold, scale, salt, per_sequence, n, *, add):
    """out = [out +] scale * x where an element stays, [out +] 0 elsewhere; rounded once."""
    s = step_scalars(scalars)
    seed = mix_seed(int(s["seed"]), int(s["step"]), salt)
    flat, values = out.reshape(-1), x.reshape(-1)
    for start in range(0, n, per_sequence):
        part = slice(start, start + per_sequence)
        sequence = int(s["first_sequence"]) + start // per_sequence * int(s["sequence_stride"])
        first = np.uint64(sequence * per_sequence)
        index = first + np.arange(min(per_sequence, n - start), dtype=np.uint64)
        stays = random_bits(seed, index) >= np.uint32(threshold)
        kept = np.where(stays, compute(values[part]) * np.float32(scale), np.float32(0))
        flat[part] = compute(flat[part]) + kept if add else kept


# -- Moving averages

AVERAGE_CASES = {"one": (128,), "ragged_grid": (1152,), "qwen05b": (14912384,)}

LOW = np.uint32(0xFFFF)
HALF = np.uint32(0x8000)


def average_update(average, param, scalars, decay, n):
    """Move the average toward param: average += (1 - d) * (param - average)."""
    s, one = step_scalars(scalars), np.float32(1)
    if s["skip_update"]:
        return
    step = np.float32(s["step"])
    weight = one - min(np.float32(decay), (one + step) / (np.float32(10) + step))
    average += (param.astype(np.float32) - average) * weight


def average_exchange(average, param, back, n):
    """Exchange param and the rounded average, or with `back` restore both; see
    llmq/cu/pointwise/elementwise.cu."""
    if param.dtype == np.float32:
        average[...], param[...] = param.copy(), average.copy()
        return
    bits, shown = average.view(np.uint32), param.view(np.uint16)
    low, before = bits & LOW, shown.astype(np.uint32)
    up = (low > HALF).astype(np.uint32)
    if back:
        shown[...] = bits >> 16
        bits[...] = (before - up) << 16 | low
    else:
        shown[...] = (bits >> 16) + up
        bits[...] = before << 16 | low
