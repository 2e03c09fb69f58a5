"""The choice of a next token from each row of logits: reference of llmq/cu/loss/sample.cu."""

import numpy as np

from llmq.ref.common import compute, mix_seed, random_bits

# rows, vocabulary, padded vocabulary
CASES = {
    "tiny": (5, 37, 40),
    "padded": (6, 505, 512),
    "wide": (6, 9001, 9008),
    "gpt2": (1, 50257, 50304),
    "qwen": (1, 151936, 151936),
    "qwen_batch": (64, 151936, 151936),
    "gemma": (16, 262144, 262144),
}

LARGEST = np.float32(3e38)  # that 1 / temperature is taken for
WHOLE = np.float32(2**31)  # the probability of the most likely id, as a whole number


def sample_choose(
    tokens, logprobs, logits, temperature, top_k, top_p, min_p, repetition, seed, position, seen,
    vocab, padded_vocab, *, softcap=0,
):  # fmt: skip
    """tokens: I32 (rows,), the id that each row of logits (rows, padded_vocab) chooses, -1 where a
    logit is NaN or infinite, or all are -infinity. logprobs: F32 (rows,), the logarithm of its
    probability before penalties, temperature and filters; NaN for -1. The others, one a row, are
    those of llmq.ops.loss.sample.Requests. seen: I32 (rows, words), bits of ids, or None. softcap:
    the cap's bits, an F32; 0: none."""
    for row, line in enumerate(logits):
        x = compute(line[:vocab])
        if softcap:
            cap = np.uint32(softcap).view(np.float32)
            x = cap * np.tanh(x / cap)
        top = x.max()
        if not np.isfinite(top):
            tokens[row], logprobs[row] = -1, np.nan
            continue
        lse = top + np.log(np.exp(x - top).sum())
        scores = x
        if seen is not None:
            bits = np.unpackbits(seen[row].view(np.uint8), bitorder="little")[:vocab]
            penalty = repetition[row]
            scores = np.where(bits, np.where(x > 0, x / penalty, x * penalty), x)
        if temperature[row] == 0:
            chosen = int(scores.argmax())
        else:
            inverse = min(1 / temperature[row], LARGEST)
            scores = (scores - scores.max()) * inverse
            ids = kept(scores, int(top_k[row]), top_p[row], min_p[row])
            noise = gumbel(int(seed[row]), int(position[row]), ids)
            chosen = int(ids[np.argmax(scores[ids] + noise)])
        tokens[row], logprobs[row] = chosen, x[chosen] - lse
        if seen is not None:
            seen.view(np.uint32)[row, chosen // 32] |= np.uint32(1 << chosen % 32)


def kept(scores: np.ndarray, top_k: int, top_p: np.float32, min_p: np.float32) -> np.ndarray:
    """The ids, ascending, that the filters leave of F32 scores, of which the largest is 0."""
    ids = np.arange(len(scores))
    if 0 < top_k < len(scores):
        least = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        ids = np.flatnonzero(scores >= least)
        ids = ids[np.argsort(-scores[ids], kind="stable")[:top_k]]
    if top_p < 1:
        mass = np.rint(np.exp(scores[ids]) * WHOLE).astype(np.int64)
        share, ids = np.float64(top_p) * mass.sum(), ids[mass > 0]
        ids = ids[np.lexsort((ids, -scores[ids]))]
        mass = np.rint(np.exp(scores[ids]) * WHOLE).astype(np.int64)
        before = np.cumsum(mass) - mass
        ids = ids[(before < share) | (before == 0)]
    return np.sort(ids[np.exp(scores[ids]) >= min(min_p, 1)])


def gumbel(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """F32: Gumbel noise of ids, a function of the 64-bit seed, the position and the id."""
    words = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position
    index = np.uint64(mix_seed(*reversed(words)) << 32) | ids.astype(np.uint64)
    uniform = random_bits(mix_seed(*words), index).astype(np.float32) * np.float32(2**-32)
    uniform = np.minimum(uniform + np.float32(2**-33), np.float32(1 - 2**-24))
    return -np.log(-np.log1p(-uniform))
