"""References of cu/loss/cross_entropy.cu: loss, log-sum-exp and gradient of rows of logits."""

import numpy as np

from llmq.base.dtypes import TOKEN_STATS
from llmq.ref.common import compute, encode_fp8, row_blocks

# rows, V, Vp
CASES = {
    "tiny": (3, 257, 320),
    "one_vector_short": (4, 505, 512),
    "full": (5, 1024, 1024),
    "few_long": (6, 151655, 151936),
    "qwen": (8192, 151936, 151936),
    "gpt2": (8192, 50257, 50304),
    "llama3": (8192, 128256, 128256),
}


def _cap(x: np.ndarray, bits: int) -> np.ndarray | None:
    """Soft-cap x in place, and return the derivatives of capped x by x; None without a cap. bits:
    the bits of the cap, an F32; 0: no cap."""
    if not bits:
        return None
    cap = np.uint32(bits).view(np.float32)
    part = np.tanh(x / cap)
    np.multiply(part, cap, out=x)
    return 1 - np.square(part)


def _softmax(
    x: np.ndarray, losses: np.ndarray, lse: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (rows, V) becomes exp(x - row max). Write losses and lse. Return the sums of the rows, and
    the indices and targets of the rows that are not masked."""
    rows = np.flatnonzero(targets >= 0)
    picked = targets[rows]
    target_logits = x[rows, picked]
    row_max = x.max(axis=1)
    x -= row_max[:, None]
    np.exp(x, out=x)
    sums = np.add.reduce(x, axis=1)
    lse[...] = row_max + np.log(sums)
    losses[...] = 0
    losses[rows] = lse[rows] - target_logits
    return sums, rows, picked


def cross_entropy_forward_backward(
    logits: np.ndarray,
    losses: np.ndarray,
    lse: np.ndarray,
    targets: np.ndarray,
    codes: np.ndarray | None,
    rows: int,
    vocab: int,
    padded_vocab: int,
    z_loss: float,
    code_factor: float,
    weights: np.ndarray | None = None,
    *,
    softcap: int = 0,
) -> None:
    """Write the gradient d to logits; or, if codes are given, FP8 codes of d * code_factor to
    codes. weights: (rows,), the rows' weights; None: all are 1."""
    for block in row_blocks(rows, padded_vocab):
        x = compute(logits[block, :vocab])
        slopes = _cap(x, softcap)
        sums, counted, picked = _softmax(x, losses[block], lse[block], targets[block])
        factor = np.zeros_like(sums)
        factor[counted] = (1 + z_loss * lse[block][counted]) / sums[counted]
        weight = 1 if weights is None else weights[block][counted]
        factor[counted] *= weight
        x *= factor[:, None]
        x[counted, picked] -= weight
        x *= 1 if slopes is None else slopes
        if len(counted) < len(x):
            x[targets[block] < 0] = 0
        if codes is not None:
            encoded = np.empty(x.shape, np.uint8)
            encode_fp8(encoded, x, np.float32(code_factor), codes.dtype)
            codes.view(np.uint8)[block, :vocab] = encoded
        elif logits.dtype != x.dtype:
            logits[block, :vocab] = x
    if codes is not None:
        codes.view(np.uint8)[:, vocab:] = 0
    else:
        logits[:, vocab:] = 0


cross_entropy_forward_backward_registers = cross_entropy_forward_backward


def cross_entropy_forward(losses, lse, logits, targets, rows, vocab, padded_vocab, *, softcap=0):
    for block in row_blocks(rows, padded_vocab):
        x = np.array(compute(logits[block, :vocab]))
        _cap(x, softcap)
        _softmax(x, losses[block], lse[block], targets[block])


def cross_entropy_stats(stats, losses, lse, targets, n, seq_len, by_weight=0, weights=None):
    losses, lse = losses.reshape(-1, seq_len), lse.reshape(-1, seq_len)
    if weights is not None:
        losses = losses * weights.reshape(-1, seq_len)
    counted = targets.reshape(-1, seq_len) >= 0
    each = counted * weights.reshape(-1, seq_len).astype(np.float64) if by_weight else counted
    named = dict.fromkeys(TOKEN_STATS, 0.0)
    named["loss"] = losses.sum(dtype=np.float64)
    named["count"] = each.sum()
    named["loss_1k"] = losses[:, :1024].sum(dtype=np.float64)
    named["tokens_1k"] = each[:, :1024].sum()
    named["lse_sum"] = lse[counted].sum(dtype=np.float64)
    if by_weight:
        named["tokens"] = np.count_nonzero(counted)
    largest = TOKEN_STATS.index("lse_max")
    most = np.fmax.reduce(lse[counted], initial=stats[largest])
    stats[: len(named)] += list(named.values())
    stats[largest] = most
