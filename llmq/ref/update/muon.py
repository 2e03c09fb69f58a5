"""Reference of Muon's own kernels; its other kernels are products."""

import numpy as np

from llmq.ref.common import BF16, SCALE_BLOCK, Scaled, Stored, mix_seed, random_bits, step_scalars

# name: (rows, columns) of a matrix; rows * columns is a multiple of 128.
CASES = {
    "one": (8, 16),
    "wide": (24, 144),
    "tall": (200, 48),
    "qwen05b_down": (896, 4864),
    "qwen15b_up_gate": (17920, 1536),
}

BLOCK = 1 << 16  # elements at a time, a multiple of SCALE_BLOCK, so that they stay in the L2 cache
LEAST_NORM = np.float32(1e-7)  # torch's least divisor


def muon_propose(change, grad, m, m_scale, scalars, one_minus_momentum, salt, first, n):
    """Update the momentum, and write the change by Nesterov's rule; see llmq.ops.update.muon."""
    s = step_scalars(scalars)
    if s["skip_update"]:
        change[...] = 0
        return
    weight, seed = np.float32(one_minus_momentum), mix_seed(_seed(s, salt))
    for low in range(0, n, BLOCK):
        part = slice(low, min(low + BLOCK, n))
        if m_scale is None:
            state = Stored(m[part])
        else:
            blocks = slice(part.start // SCALE_BLOCK, part.stop // SCALE_BLOCK)
            state = Scaled(m[part], m_scale[blocks], root=False)
        g = grad[part].astype(np.float32) * s["grad_scale"]
        made = state.load(np.float32)
        made = made + (g - made) * weight
        change[part] = made + (g - made) * weight
        if state.rounds:
            state.round(made, _bits(seed, first + low, made.size), high=False)
        else:
            m[part] = made


def muon_squares(partials, x, n):
    """Write each matrix's sum of squares to the first of its partial sums."""
    partials[...] = 0
    for sums, matrix in zip(partials, x.reshape(len(x), n), strict=True):
        values = matrix.astype(np.float64)
        sums[0] = values @ values


def muon_normalize(out, x, partials, num_partials, n):
    """Divide each matrix by its norm, rounded to BF16."""
    for to, matrix, sums in zip(out, x, partials, strict=True):
        norm = np.float32(np.sqrt(sums.sum())).astype(BF16).astype(np.float32)
        factor = np.float32(1) / np.maximum(norm, LEAST_NORM)
        to[...] = matrix.astype(np.float32) * factor


def muon_diagonal(x, value, side, count):
    """Add the value to the diagonal of each matrix."""
    for matrix in x:
        numbers = matrix.reshape(-1)[:: side + 1]
        numbers[...] = numbers.astype(np.float32) + np.float32(value)


def muon_row_factors(factors, v, squares, one_minus_decay, columns, rows, shift):
    """Update v, the moving averages of rows' mean squares, and write the factor of each row; see
    llmq.ops.update.muon.even."""
    tensors = (factors, v.reshape(-1)[shift:], squares)
    for to, mean, of in zip(*(t.reshape(-1, rows) for t in tensors), strict=True):
        before = of.sum()
        if before > 0:
            mean += ((of / columns).astype(np.float32) - mean) * np.float32(one_minus_decay)
        to[...] = np.float32(1) / (np.sqrt(mean) + np.float32(1e-10))
        after = (of * to.astype(np.float64) ** 2).sum()
        to *= np.float32(np.sqrt(before / after) if after > 0 else 0)


def muon_row_scale(x, factors, columns):
    """Multiply each row of x (rows, columns) by the row's factor; factors: F32 (rows,)."""
    for row, factor in zip(x.reshape(-1, columns), factors.ravel(), strict=True):
        row[...] = row.astype(np.float32) * factor


def muon_apply(param, work, change, scalars, lr_scale, weight_decay, salt, first, n):
    """param -= lr * change + lr * weight_decay * param, and work = param in BF16."""
    s = step_scalars(scalars)
    if s["skip_update"]:
        return
    lr = s["lr"] * np.float32(lr_scale)
    decay, seed = lr * np.float32(weight_decay), _seed(s, salt)
    for low in range(0, n, BLOCK):
        part = slice(low, min(low + BLOCK, n))
        state = Stored(param[part])
        p, proposed = state.load(np.float32), change[part].astype(np.float32)
        p = p - (proposed * lr + p * decay)
        if state.rounds:
            state.round(p, _bits(seed, first + low, p.size), high=False)
        else:
            param[part] = p
        if work is not None:
            work[part] = param[part]


def _seed(s: np.void, salt: int) -> int:
    return mix_seed(int(s["seed"]), int(s["step"]), salt)


def _bits(seed: int, first: int, count: int) -> np.ndarray:
    return random_bits(seed, np.arange(first, first + count, dtype=np.uint64))
