"""References of cu/loss/mtp.cu: inputs and statistics of a head for multi-token prediction."""

import numpy as np

# batch, sequence
CASES = {"smallest": (1, 4), "documents": (3, 100), "rows": (4, 2048)}
MASKED = -100


def mtp_shift(tokens, targets, of_tokens, of_targets, starts, n, seq_len):
    """Reference of mtp_shift: tokens and targets one position ahead, (B, T) each. starts: first
    position of each token's document; None: each row is a document. The last position of a
    document is masked, and keeps its own token."""
    last = np.ones(tokens.shape, bool)
    first = np.zeros(tokens.shape, np.int32) if starts is None else starts
    last[:, :-1] = first[:, 1:] != first[:, :-1]
    tokens[...] = np.where(last, of_tokens, np.roll(of_tokens, -1, axis=1))
    targets[...] = np.where(last, MASKED, np.roll(of_targets, -1, axis=1))


def mtp_stats(stats, losses, trunk, targets, of_targets, n, every):
    """Reference of mtp_stats: stats F64 (2,) += k * the means over `targets` of the head's loss and
    of min(1, q / p). k: number of the trunk's targets; p, q: a target's probability by the trunk
    and by the head. losses, trunk: losses of head and trunk, F32 (n,). of_targets: (every,), the
    trunk's targets of all sequences."""
    at = np.flatnonzero(targets.reshape(-1) >= 0)
    if at.size == 0:
        return
    own, theirs = losses.reshape(-1)[at], trunk.reshape(-1)[at + 1]
    times = (of_targets >= 0).sum() / at.size
    stats[0] += times * own.sum(dtype=np.float64)
    stats[1] += times * np.exp(np.minimum(theirs - own, 0)).sum(dtype=np.float64)
