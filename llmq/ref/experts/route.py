"""References of cu/experts/route.cu: choice and weights of experts, and balancing losses."""

import numpy as np

from llmq.base.batch import FILLER_TARGET
from llmq.ref.common import compute, sigmoid

# rows, experts, experts per row
CASES = {
    "one": (1, 8, 2),
    "small": (50, 32, 4),
    "ragged": (77, 60, 4),
    "all_of_them": (9, 4, 4),
    "many_experts": (33, 512, 10),
    "qwen30b": (16384, 128, 8),
    "deepseek_v3": (16384, 256, 8),
}

# Sums over rows are integers, so that the order of addition does not matter. A sum is the number
# times its unit.
PROBABILITY_UNIT = 2.0**32  # for probabilities and entropies
SQUARE_UNIT = 2.0**20  # for squares of log-sum-exp, each at most MOST_SQUARE
MOST_SQUARE = 2.0**20
EXTRA_SUMS = ("rows", "entropy", "square", "not_finite")  # follow rows and probabilities by expert
TINY = 1e-20  # added to a sum of sigmoids, which may be 0


def sums_size(experts: int) -> int:
    """Number of a layer's sums."""
    return 2 * experts + len(EXTRA_SUMS)


def _softmax(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of all experts (rows, experts), and log-sum-exp (rows,)."""
    x = compute(logits)
    most = np.fmax.reduce(x, axis=1)
    p = np.exp(x - most[:, None])
    total = np.add.reduce(p, axis=1)
    p /= total[:, None]
    return p, most + np.log(total)


def _shares(
    logits: np.ndarray, p: np.ndarray | None, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Shares of the chosen experts before `scale`, and the sum of these shares, the divisor of
    renormalized shares. p: probabilities of all experts; None: shares are sigmoids of logits."""
    if p is None:
        values = sigmoid(compute(np.take_along_axis(logits, chosen, axis=1)))
        tiny = values.dtype.type(TINY)
    else:
        values, tiny = np.take_along_axis(p, chosen, axis=1), 0
    total = values[:, 0].copy()
    for k in range(1, values.shape[1]):
        total += values[:, k]
    return values, (total + tiny)[:, None]


def _counted(targets: np.ndarray | None) -> np.ndarray | slice:
    """An index of the rows that count in sums and losses: all but filler."""
    if targets is None:
        return slice(None)
    counted = targets != FILLER_TARGET
    return slice(None) if counted.all() else counted


def _largest(scores: np.ndarray, count: int, left_out: np.ndarray | None = None) -> np.ndarray:
    """The columns of the `count` largest scores of each row; the first columns among equal scores,
    NaN last. left_out: mask of columns that come after all others."""
    order = np.argsort(-scores, axis=1, kind="stable")
    if left_out is not None:
        at_end = np.argsort(np.take_along_axis(left_out, order, axis=1), axis=1, kind="stable")
        order = np.take_along_axis(order, at_end, axis=1)
    return order[:, :count]


def route(
    chosen, weights, sums, logits, bias, targets, rows, E, top_k, scale, *, by_sigmoid, renormalize,
    groups=None, active_groups=None,
):  # fmt: skip
    scores = sigmoid(compute(logits)) if by_sigmoid else compute(logits)
    if bias is not None:
        scores = scores + bias
    left_out = None
    if groups is not None:
        each = -np.sort(-scores.reshape(rows, groups, -1), axis=2)  # NaN last
        best = _largest(each[..., 0] + each[..., 1] if by_sigmoid else each[..., 0], active_groups)
        left_out = np.ones((rows, groups), bool)
        np.put_along_axis(left_out, best, values=False, axis=1)
        left_out = left_out.repeat(E // groups, axis=1)
    chosen[...] = _largest(scores, top_k, left_out)
    p, lse = _softmax(logits) if not by_sigmoid or sums is not None else (None, None)
    values, total = _shares(logits, None if by_sigmoid else p, chosen)
    weights[...] = (values / total if renormalize else values) * weights.dtype.type(scale)
    if sums is None:
        return
    counted = _counted(targets)
    x, p, lse = compute(logits)[counted], p[counted], lse[counted]
    sums[:E] += np.bincount(chosen[counted].reshape(-1), minlength=E)
    finite = np.isfinite(lse)
    sums[2 * E] += len(lse)
    sums[2 * E + 3] += np.count_nonzero(~finite)
    p, lse, x = p[finite], lse[finite], x[finite]
    sums[E : 2 * E] += _units(p, PROBABILITY_UNIT).sum(axis=0)
    mean = np.add.reduce(np.multiply(p, x, where=p > 0, out=np.zeros_like(p)), axis=1)
    sums[2 * E + 1] += _units(lse - mean, PROBABILITY_UNIT).sum()
    sums[2 * E + 2] += _units(np.minimum(lse * lse, MOST_SQUARE), SQUARE_UNIT).sum()


def _units(x: np.ndarray, unit: float) -> np.ndarray:
    return np.rint(x * x.dtype.type(unit)).astype(np.int64)


def route_backward(
    d_logits, d_weights, of_experts, logits, chosen, factors, targets, rows, E, top_k, scale, *,
    by_sigmoid, renormalize,
):  # fmt: skip
    p, lse = _softmax(logits) if not by_sigmoid or factors is not None else (None, None)
    values, total = _shares(logits, None if by_sigmoid else p, chosen)
    g = compute(d_weights)
    if of_experts is not None:
        g = g + np.take_along_axis(of_experts, chosen, axis=1)
    g = g * values.dtype.type(scale)
    d = np.zeros(logits.shape, values.dtype)  # gradient of logits; of_p: of all probabilities
    of_p = np.zeros_like(d)
    if renormalize:
        shares = values / total
        g = g - np.add.reduce(g * shares, axis=1, keepdims=True)
        g /= total
    if by_sigmoid:
        np.put_along_axis(d, chosen, g * values * (1 - values), axis=1)
    elif renormalize:
        np.put_along_axis(d, chosen, g * values, axis=1)
    else:
        np.put_along_axis(of_p, chosen, g, axis=1)
    counted = _counted(targets)
    if factors is not None:
        of_p[counted] += factors[:E]
        d[counted] += p[counted] * (lse[counted] * factors[E])[:, None]
    by_p = not (by_sigmoid or renormalize)
    if factors is not None or by_p:
        of = slice(None) if by_p else counted
        p, of_p = p[of], of_p[of]
        d[of] += p * (of_p - np.add.reduce(of_p * p, axis=1, keepdims=True))
    d_logits[...] = d


def route_balance(factors, losses, totals, sums, targets, by, layers, E, rows, aux, z):
    of_all = sums.sum(axis=0)
    trained, seen = targets >= 0, float(of_all[2 * E])
    count = np.count_nonzero(trained)
    divisor = count if by is None else by[trained].sum(dtype=np.float64)
    factors[...] = 0
    if seen:
        load = of_all[:E] / seen
        probability = of_all[E : 2 * E] / PROBABILITY_UNIT / seen
        factors[:E] = aux * E * divisor / seen * load
        factors[E] = 2 * z * divisor / seen
        losses[0] += count * E * float(load @ probability)
        losses[1] += count * (of_all[2 * E + 2] / SQUARE_UNIT / seen)
        losses[2] += count * (of_all[2 * E + 1] / PROBABILITY_UNIT / seen)
        losses[3] += count * float(sums[:, :E].max() / (seen / layers))
    totals += sums
    sums[...] = 0
