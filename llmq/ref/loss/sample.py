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

PART = 8192  # ids per part of a row
LARGEST = np.float32(3e38)  # upper bound of 1 / temperature
WHOLE = np.float32(2**31)  # the probability of the most likely id, as a whole number


def sample_scan(stats, largest, logits, repetition, seen, vocab, padded_vocab, parts, *, softcap=0):
    """Find the largest logits of each part of PART ids in each row of logits (rows, padded_vocab).

    stats: F32 (rows, parts, 2), the largest logit, NaN where a logit is NaN or infinite, and the
    sum of exp(logit - the largest). largest: I64 (rows, parts), the place of the largest penalized
    logit in the order of `places`. seen: I32 (rows, words), bits of ids, or None. softcap: the
    bits of the cap, an F32; 0: no cap.
    """
    x, penalized = _read(logits[:, :vocab], repetition, seen, softcap)
    for part in range(parts):
        own = slice(part * PART, (part + 1) * PART)
        top = x[:, own].max(axis=1)
        base = np.where(np.isfinite(top), top, 0)
        stats[:, part, 0] = np.where(top < np.inf, top, np.nan)
        stats[:, part, 1] = np.exp(x[:, own] - base[:, None]).sum(axis=1)
        best = penalized[:, own].argmax(axis=1)
        values = np.take_along_axis(penalized[:, own], best[:, None], axis=1)[:, 0]
        largest[:, part] = places(values, best + part * PART)


def sample_cut(
    last, logits, largest, temperature, top_k, top_p, repetition, seen, vocab, padded_vocab, parts,
    *, softcap=0,
):  # fmt: skip
    """last: I64 (rows,), the rank (bits of |score|, then the id) of the last id that top_k and
    top_p keep; -1, the largest unsigned number, where they keep all ids."""
    last[...] = -1
    for row in np.flatnonzero((temperature != 0) & ((top_k > 0) | (top_p < 1))):
        scores = _scores(logits, largest, temperature, repetition, seen, vocab, softcap, row)
        if np.isfinite(scores.max()):
            ids = kept(scores, int(top_k[row]), top_p[row], np.float32(0))
            last[row] = ranks(scores[ids], ids).max().view(np.int64)


def sample_draw(
    found, logits, largest, last, temperature, min_p, repetition, seed, position, seen, vocab,
    padded_vocab, parts, *, softcap=0,
):  # fmt: skip
    """found: I64 (rows, parts), the place of the largest sum of score and noise in each part; with
    temperature 0, the place of the row's largest penalized logit."""
    found[...] = largest.view(np.uint64).max(axis=1, keepdims=True).view(np.int64)
    for row in np.flatnonzero(temperature):
        scores = _scores(logits, largest, temperature, repetition, seen, vocab, softcap, row)
        ids = np.flatnonzero(np.exp(scores) >= min(min_p[row], 1))
        ids = ids[ranks(scores[ids], ids) <= last[row].view(np.uint64)]
        found[row] = 0
        if len(ids):
            sums = scores[ids] + gumbel(int(seed[row]), int(position[row]), ids)
            best = np.argmax(sums)
            found[row, ids[best] // PART] = places(sums[best], ids[best])


def sample_finish(
    tokens, logprobs, logits, stats, found, seen, rows, vocab, padded_vocab, parts, *, softcap=0
):
    """tokens: I32 (rows,), the ids of the rows' largest places; -1 where a logit is NaN or
    infinity, or all are -infinity. logprobs: F32 (rows,), the tokens' log-probabilities before
    penalties, temperature and filters; NaN for token -1. The tokens' bits are set in seen."""
    top = stats[:, :, 0].max(axis=1)  # NaN if any part's is NaN
    valid = np.isfinite(top)
    base = np.where(valid, top, 0)[:, None]
    total = (stats[:, :, 1] * np.exp(stats[:, :, 0] - base)).sum(axis=1)
    chosen = (~found.view(np.uint64).max(axis=1).astype(np.uint32)).astype(np.int64)
    chosen = np.where(valid, chosen, 0)
    x = _capped(logits[np.arange(len(chosen)), chosen], softcap)
    tokens[...] = np.where(valid, chosen, -1)
    logprobs[...] = np.where(valid, x - (base[:, 0] + np.log(total)), np.nan)
    if seen is not None:
        rows = np.flatnonzero(valid)
        bits = np.left_shift(np.uint32(1), (chosen[rows] % 32).astype(np.uint32))
        seen.view(np.uint32)[rows, chosen[rows] // 32] |= bits


def _capped(logits, softcap):
    x = compute(logits)
    if softcap:
        cap = np.uint32(softcap).view(np.float32)
        x = cap * np.tanh(x / cap)
    return x


def _read(logits, repetition, seen, softcap):
    """Capped logits (rows, vocab), and capped logits with the penalty of ids that were seen."""
    x = _capped(logits, softcap)
    if seen is None or (repetition == 1).all():
        return x, x
    bits = np.unpackbits(seen.view(np.uint8), axis=1, bitorder="little")[:, : x.shape[1]]
    penalty = repetition[:, None]
    return x, np.where(bits, np.where(x > 0, x / penalty, x * penalty), x)


def _scores(logits, largest, temperature, repetition, seen, vocab, softcap, row):
    """The scores of a row, F32 (vocab,); the largest is 0."""
    own = slice(row, row + 1)
    seen = None if seen is None else seen[own]
    _, penalized = _read(logits[own, :vocab], repetition[own], seen, softcap)
    inverse = min(1 / temperature[row], LARGEST)
    return (penalized[0] - numbers(largest[row].view(np.uint64).max())) * inverse


def places(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """I64: each number and its id in one word. As unsigned numbers, the words ascend with x, and
    descend with the id where x is equal."""
    bits = (np.asarray(x, np.float32) + np.float32(0)).view(np.uint32)
    order = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64) << np.uint64(
        32
    )
    return (order | ~np.asarray(ids, np.uint32)).view(np.int64)


def numbers(order: np.ndarray) -> np.ndarray:
    """Return the F32 numbers in the upper words of places (uint64), the inverse of `places`."""
    bits = (order >> np.uint64(32)).astype(np.uint32)
    return np.where(bits >> 31, bits ^ np.uint32(1 << 31), ~bits).astype(np.uint32).view(np.float32)


def ranks(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Unsigned numbers that ascend as scores descend, and ascend with the id where scores are
    equal. scores: at most 0."""
    bits = np.abs(scores).view(np.uint32).astype(np.uint64)
    return bits << np.uint64(32) | ids.astype(np.uint64)


def kept(scores: np.ndarray, top_k: int, top_p: np.float32, min_p: np.float32) -> np.ndarray:
    """The ids, ascending, that the filters keep. scores: F32, the largest is 0."""
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
    """Gumbel noise of ids, F32: a function of the 64-bit seed, the position and the id."""
    words = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position
    index = np.uint64(mix_seed(*reversed(words)) << 32) | ids.astype(np.uint64)
    uniform = random_bits(mix_seed(*words), index).astype(np.float32) * np.float32(2**-32)
    uniform = np.minimum(uniform + np.float32(2**-33), np.float32(1 - 2**-24))
    return -np.log(-np.log1p(-uniform))
