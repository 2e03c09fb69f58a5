"""References of cu/loss/distill.cu: rows of logits learn from a teacher's largest probabilities."""

import numpy as np

from llmq.ref.common import compute, row_blocks

# rows, V, Vp, k
CASES = {
    "smallest": (2, 9, 16, 1),
    "few": (4, 257, 320, 8),
    "many": (3, 2000, 2048, 64),
    "qwen": (2048, 151936, 151936, 64),
}
LEAST = 2.0**-30  # least probability of the other columns, so that its logarithm is finite


def distill(
    logits, losses, lse, kl, targets, teacher, rows, vocab, padded_vocab, k, reverse, gradient,
    mixture, temperature,
):  # fmt: skip
    for block in row_blocks(rows, padded_vocab):
        x = compute(logits[block, :vocab]).astype(np.float64)
        counted = targets[block] >= 0
        target = np.where(counted, targets[block], 0)[:, None]
        lse[block] = own_lse = np.logaddexp.reduce(x, axis=1)
        soft_lse = np.logaddexp.reduce(x / temperature, axis=1)[:, None]
        ids = teacher[block, :k].view(np.int32)
        log_t = teacher[block, k:].astype(np.float64)
        rest = np.maximum(1 - np.exp(log_t).sum(axis=1, keepdims=True), LEAST)
        log_p = log_t / temperature
        log_p += np.log(1 - rest) - np.logaddexp.reduce(log_p, axis=1)[:, None]
        log_q = np.take_along_axis(x, ids, axis=1) / temperature - soft_lse
        p, q = np.exp(log_p), np.exp(log_q)
        others = np.exp(x / temperature - soft_lse)
        np.put_along_axis(others, ids, 0, axis=1)  # 1 - sum of q would cancel digits
        q_rest = np.maximum(others.sum(axis=1, keepdims=True), LEAST)
        ratio = np.log(q_rest / rest)
        parts = q * (log_q - log_p) if reverse else p * (log_p - log_q)
        of_rest = q_rest * ratio if reverse else -rest * ratio
        divergence = parts.sum(axis=1, keepdims=True) + of_rest
        ce = own_lse - np.take_along_axis(x, target, axis=1)[:, 0]
        kl[block] = np.where(counted, divergence[:, 0], 0)
        soft = (1 - mixture) * temperature**2
        losses[block] = np.where(counted, mixture * ce + soft * divergence[:, 0], 0)
        if not gradient:
            continue
        outside = ratio - divergence if reverse else 1 - rest / q_rest
        inside = q * (log_q - log_p - divergence) if reverse else q - p
        d = outside * np.exp(x / temperature - soft_lse)
        np.put_along_axis(d, ids, inside, axis=1)
        d = mixture * np.exp(x - own_lse[:, None]) + (1 - mixture) * temperature * d
        d[np.arange(len(d)), target[:, 0]] -= mixture
        d[~counted] = 0
        logits[block, :vocab] = d
        logits[block, vocab:] = 0


def distill_add(stats, kl, rows, index):
    stats[index] += kl.sum(dtype=np.float64)


def top_k(top, logits, lse, rows, vocab, padded_vocab, k):
    """top (rows, 2 k): the columns of the k largest logits, ascending, as the bits of I32; then
    the log-probabilities of these columns."""
    for row in range(rows):
        x = compute(logits[row, :vocab])
        largest = np.sort(np.argsort(-x, kind="stable")[:k])
        top[row, :k] = largest.astype(np.int32).view(np.float32)
        top[row, k:] = x[largest] - lse[row]
