"""References of cu/loss/grpo.cu: losses of a policy's own samples, by their advantages."""

from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import STATS

# batch, sequence, documents per row (0: each row is a document)
CASES = {
    "smallest": (1, 8, 1),
    "rows": (3, 40, 0),
    "across_warps": (2, 100, 2),
    "many": (3, 264, 9),
    "long": (4, 32768, 8),
}
TOKEN, SEQUENCE, CAPPED = range(3)
PER_TOKEN, PER_DOCUMENT = range(2)
LARGEST_LOG = 80.0  # upper bound of log ratios: exp stays finite, so that advantage 0 gives 0
# These statistics follow those of every loss; all but `documents` are sums over trained tokens.
SUMS = ("tokens", "documents", "clipped", "ratio", "drift", "kl", "entropy")


class Form(NamedTuple):
    """The numbers of a loss. kind: TOKEN, each token has its own ratio of new to old probability;
    SEQUENCE, a document's tokens share the geometric mean of theirs; CAPPED, the ratio is a weight
    without a gradient. low, high: bounds of ratios; CAPPED has no lower bound. beta: weight of the
    divergence from the reference. per: the loss is a mean over tokens (PER_TOKEN) or documents
    (PER_DOCUMENT). length: with PER_DOCUMENT the divisor of a document's sum; 0: its number of
    tokens."""

    kind: int
    low: float
    high: float
    beta: float
    per: int
    length: float


class Value(NamedTuple):
    """Arrays F64 (n,) of n tokens. loss: the token's loss. weight: its negative derivative by the
    token's log-probability. clipped: whether the ratio is out of bounds. ratio: the ratio. kl: the
    ratio times the divergence from the reference."""

    loss: np.ndarray
    weight: np.ndarray
    clipped: np.ndarray
    ratio: np.ndarray
    kl: np.ndarray


def divergence(gap: np.ndarray) -> np.ndarray:
    """One-sample estimate of the divergence from the reference. gap: log-probability by the
    reference minus log-probability by the model."""
    return np.exp(np.minimum(gap, LARGEST_LOG)) - gap - 1


def of_tokens(
    form: Form,
    advantage: np.ndarray,
    logp: np.ndarray,
    log_ratio: np.ndarray,
    reference: np.ndarray | None,
    mean_kl: np.ndarray | None = None,
) -> Value:
    """The losses of n tokens; all arrays are F64 (n,). log_ratio: log of the token's ratio, or with
    SEQUENCE of its document's ratio. reference: log-probabilities by the reference; None: beta is
    0. mean_kl: with SEQUENCE, the mean divergence of the token's document."""
    ratio = np.exp(np.minimum(log_ratio, LARGEST_LOG))
    if form.kind == CAPPED:
        clipped, bounded = ratio > form.high, np.minimum(ratio, form.high)
        loss, weight = -bounded * advantage * logp, bounded * advantage
    else:
        own, held = ratio * advantage, np.clip(ratio, form.low, form.high) * advantage
        clipped = own > held
        loss, weight = -np.where(clipped, held, own), np.where(clipped, 0, own)
    kl = np.zeros_like(logp)
    if reference is not None:
        gap = reference - logp
        own = divergence(gap)
        kl, held = ratio * own, own if mean_kl is None else mean_kl
        loss, weight = loss + form.beta * kl, weight + form.beta * ratio * (own + gap - held)
    return Value(loss, weight, clipped, ratio, kl)


def _firsts(starts: np.ndarray | None, n: int, seq_len: int) -> np.ndarray:
    """For each position, the first position of its document, among all n positions."""
    rows = np.arange(n) // seq_len * seq_len
    return rows if starts is None else rows + starts.reshape(-1)


def grpo_sums(sums, targets, losses, old, reference, starts, n, seq_len):
    """Write sums only at the first positions of documents."""
    counted, first = targets.reshape(-1) >= 0, _firsts(starts, n, seq_len)
    logp = -losses.reshape(-1).astype(np.float64)
    kl = np.zeros(n) if reference is None else divergence(reference.reshape(-1) - logp)
    at = np.flatnonzero(first == np.arange(n))
    of_tokens = (logp - old.reshape(-1), np.ones(n), kl)
    for row, values in zip(sums.reshape(3, n), of_tokens, strict=True):
        row[at] = np.bincount(first[counted], weights=values[counted], minlength=n)[at]


def _values(form, sums, targets, losses, old, reference, advantages, starts, n, seq_len):
    """Indices of the trained tokens; their values, with loss and weight divided by the document's
    length with PER_DOCUMENT; and their log-probabilities by the new and the old policy."""
    at = np.flatnonzero(targets.reshape(-1) >= 0)
    first = _firsts(starts, n, seq_len)[at]
    total, count, kl = sums.reshape(3, n)[:, first].astype(np.float64)
    logp, log_old, advantage = (
        x.reshape(-1)[at].astype(np.float64) for x in (-losses, old, advantages)
    )
    if reference is not None:
        reference = reference.reshape(-1)[at].astype(np.float64)
    log_ratio, mean_kl = logp - log_old, None
    if form.kind == SEQUENCE:
        log_ratio, mean_kl = total / count, kl / count
    value = of_tokens(form, advantage, logp, log_ratio, reference, mean_kl)
    if form.per == PER_DOCUMENT:
        each = 1 / (form.length or count)
        value = value._replace(loss=value.loss * each, weight=value.weight * each)
    return at, value, logp, log_old


def grpo_weights(weights, *args):
    """args: tensors of _values, n, seq_len, and the numbers of Form."""
    tensors, form = args[:-6], Form(*args[-6:])
    at, value, _, _ = _values(form, *tensors)
    flat = weights.reshape(-1)
    flat[:] = 0
    flat[at] = value.weight


def grpo_stats(stats, *args):
    """args: as in grpo_weights."""
    tensors, form = args[:-6], Form(*args[-6:])
    sums, n = tensors[0], tensors[-2]
    at, value, logp, log_old = _values(form, *tensors)
    first = _firsts(tensors[-3], n, tensors[-1])
    begins = np.flatnonzero(first == np.arange(n))
    documents = (sums.reshape(3, n)[1, begins] > 0).sum()
    named = dict.fromkeys((*STATS, *SUMS), 0.0)
    named |= {"loss": value.loss.sum(), "tokens": len(at), "documents": documents}
    named |= {"count": len(at) if form.per == PER_TOKEN else documents}
    named |= {"clipped": value.clipped.sum(), "ratio": value.ratio.sum(), "kl": value.kl.sum()}
    named |= {"drift": np.abs(logp - log_old).sum(), "entropy": -logp.sum()}
    stats[: len(named)] += list(named.values())
