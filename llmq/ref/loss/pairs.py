"""References of cu/loss/pairs.cu: losses of pairs of documents."""

from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import STATS

# batch, sequence, pairs per row
CASES = {
    "smallest": (1, 8, 1),
    "across_warps": (2, 100, 2),
    "many": (3, 264, 9),
    "rows": (4, 2048, 6),
    "long": (1, 32768, 4),
}
SIGMOID, IPO, ORPO, KTO = range(4)
# These statistics follow those of every loss. A KTO pair counts as chosen or as rejected, other
# pairs as both; rewards and log-probabilities are sums over the chosen and over the rejected
# documents; kl is the sum of KTO's shift over pairs.
SUMS = (
    *("tokens", "accuracy", "chosen", "rejected"),
    *("reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected", "kl"),
)


class Documents(NamedTuple):
    """F64 (pairs,) each, for one document of each pair: gain in log-probability over the reference,
    log-probability, and number of trained tokens."""

    gain: np.ndarray
    logp: np.ndarray
    count: np.ndarray


class Form(NamedTuple):
    """The constants of a preference loss. kind: SIGMOID (DPO and SimPO), IPO, ORPO or KTO.
    normalize: 1 if a document's gain is divided by its number of tokens, else 0. beta, gamma,
    smoothing: the constants of the loss's paper. sft: the weight of the chosen document's mean
    cross-entropy. With KTO, gamma and sft are the weights of desirable and of undesirable
    documents."""

    kind: int
    normalize: int
    beta: float
    gamma: float
    smoothing: float
    sft: float


class Value(NamedTuple):
    """Arrays (pairs,): the loss, its derivatives by the log-probabilities of the chosen and the
    rejected document, and the rewards of both."""

    loss: np.ndarray
    d_chosen: np.ndarray
    d_rejected: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def _log_odds(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log(p / (1 - p)) with p = exp(a), and the derivative by a."""
    rest = -np.expm1(np.minimum(a, -1e-7))
    return a - np.log(rest), 1 / rest


def of_pair(form: Form, c: Documents, r: Documents) -> Value:
    """The losses of pairs by SIGMOID, IPO or ORPO. c, r: chosen and rejected documents."""
    each_c, each_r = (1 / d.count if form.normalize else 1.0 for d in (c, r))
    x_c, x_r = c.gain * each_c, r.gain * each_r
    if form.kind == SIGMOID:
        m, e = form.beta * (x_c - x_r) - form.gamma, form.smoothing
        loss = (1 - e) * np.logaddexp(0, -m) + e * np.logaddexp(0, m)
        slope = form.beta * (e * _sigmoid(m) - (1 - e) * _sigmoid(-m))
        slopes = (slope * each_c, -slope * each_r)
    elif form.kind == IPO:
        m = x_c - x_r - 0.5 / form.beta
        loss, slopes = m * m, (2 * m * each_c, -2 * m * each_r)
    else:
        (odds_c, slope_c), (odds_r, slope_r) = (_log_odds(d.logp / d.count) for d in (c, r))
        m = odds_c - odds_r
        loss, slope = form.beta * np.logaddexp(0, -m), -form.beta * _sigmoid(-m)
        slopes = (slope * slope_c / c.count, -slope * slope_r / r.count)
    loss = loss - form.sft * c.logp / c.count
    slopes = (slopes[0] - form.sft / c.count, slopes[1])
    return Value(loss, *slopes, form.beta * x_c, form.beta * x_r)


def of_label(form: Form, own: Documents, preferred: np.ndarray, shift: float) -> Value:
    """KTO's losses of single documents. preferred: whether each document is desirable."""
    sign = np.where(preferred, form.beta, -form.beta)
    weight = np.where(preferred, form.gamma, form.sft)
    s, reward = _sigmoid(sign * (own.gain - shift)), form.beta * own.gain
    return Value(weight * (1 - s), -weight * s * (1 - s) * sign, 0 * s, reward, reward)


def _documents(sums: np.ndarray, at: np.ndarray) -> Documents:
    return Documents(*sums.reshape(3, -1)[:, at].astype(np.float64))


class _Pairs(NamedTuple):
    """Arrays (pairs,): the positions, among all, at which the pair's first and second document
    begin, and whether the first document is preferred."""

    one: np.ndarray
    two: np.ndarray
    preferred: np.ndarray


def _pairs(starts: np.ndarray, partner: np.ndarray, seq_len: int) -> _Pairs:
    starts, partner = starts.reshape(-1), partner.reshape(-1)
    at = np.arange(len(starts)) % seq_len
    other = np.abs(partner).astype(np.int64) - 1
    one = np.flatnonzero((partner != 0) & (at == starts) & (starts < other))
    return _Pairs(one, one - at[one] + other[one], partner[one] > 0)


def pairs_sums(sums, targets, losses, reference, starts, partner, n, seq_len):
    """Write sums only at the first positions of documents in pairs."""
    counted = (targets.reshape(-1) >= 0) & (partner.reshape(-1) != 0)
    logp = -losses.reshape(-1).astype(np.float64)
    gain = logp - (0 if reference is None else reference.reshape(-1))
    first = starts.reshape(-1) + np.arange(n) // seq_len * seq_len
    found = [
        np.bincount(first[counted], weights=values[counted], minlength=n)
        for values in (gain, logp, np.ones(n))
    ]
    pairs = _pairs(starts, partner, seq_len)
    at = np.concatenate([pairs.one, pairs.two])
    sums.reshape(3, n)[:, at] = np.array(found)[:, at]


def pairs_gains(gains, sums, starts, partner, n, seq_len):
    other = _documents(sums, _pairs(starts, partner, seq_len).two)
    there = other.count > 0
    gains[:] = other.gain[there].sum(), there.sum()


def pairs_shift(shift, gained, ranks):
    gain, count = gained.sum(axis=0)
    shift[0] = max(gain / count, 0) if count else 0


def _values(
    sums: np.ndarray, shift: np.ndarray | None, pairs: _Pairs, form: Form
) -> tuple[np.ndarray, Documents, Documents, Value]:
    """Mask of pairs with trained tokens, their chosen and rejected documents (with KTO: first and
    second documents), and their values."""
    one, two = _documents(sums, pairs.one), _documents(sums, pairs.two)
    there = (one.count > 0) & ((two.count > 0) | (form.kind == KTO))
    one, two = (Documents(*(x[there] for x in d)) for d in (one, two))
    preferred = pairs.preferred[there]
    if form.kind == KTO:
        return there, one, two, of_label(form, one, preferred, float(shift[0]))
    c, r = (
        Documents(*(np.where(preferred, a, b) for a, b in zip(*order, strict=True)))
        for order in ((one, two), (two, one))
    )
    return there, c, r, of_pair(form, c, r)


def pairs_weights(weights, sums, shift, targets, starts, partner, n, seq_len, *numbers):
    """numbers: the fields of Form."""
    pairs, form = _pairs(starts, partner, seq_len), Form(*numbers)
    there, _, _, value = _values(sums, shift, pairs, form)
    of_first = np.zeros(n)
    swap = form.kind != KTO and ~pairs.preferred[there]
    of_first[pairs.one[there]] = -np.where(swap, value.d_rejected, value.d_chosen)
    of_first[pairs.two[there]] = -np.where(swap, value.d_chosen, value.d_rejected)
    first = starts.reshape(-1) + np.arange(n) // seq_len * seq_len
    counted = (targets.reshape(-1) >= 0) & (partner.reshape(-1) != 0)
    weights.reshape(-1)[:] = np.where(counted, of_first[first], 0)


def pairs_stats(stats, sums, shift, starts, partner, n, seq_len, *numbers):
    """numbers: the fields of Form."""
    pairs, form = _pairs(starts, partner, seq_len), Form(*numbers)
    there, c, r, value = _values(sums, shift, pairs, form)
    named = dict.fromkeys((*STATS, *SUMS), 0.0)
    named |= {"loss": value.loss.sum(), "count": there.sum()}
    if form.kind == KTO:
        good = pairs.preferred[there]
        sides = (("chosen", good, c), ("rejected", ~good, c))
        named |= {"kl": float(shift[0]) * there.sum()}
        named |= {"tokens": c.count.sum(), "accuracy": ((value.chosen > 0) == good).sum()}
    else:
        every = np.ones(len(value.loss), bool)
        sides = (("chosen", every, c), ("rejected", every, r))
        named |= {"tokens": (c.count + r.count).sum()}
        named["accuracy"] = (value.chosen > value.rejected).sum()
    for (name, of, documents), reward in zip(sides, (value.chosen, value.rejected), strict=True):
        named |= {name: of.sum(), f"reward_{name}": reward[of].sum()}
        named[f"logp_{name}"] = documents.logp[of].sum()
    stats[: len(named)] += list(named.values())
