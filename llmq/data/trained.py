"""How many tokens of files count in the loss, as far as their masks say."""

from __future__ import annotations

import numpy as np

from llmq.data.tokens import TokenFile

_BLOCK = 1 << 23  # mask bits that are looked at together


def has_trained_tokens(file: TokenFile) -> bool:
    """Whether a file has a token whose prediction counts. The first of a file is predicted by none.

    Reads masks up to the first one that is set.
    """
    if not file.has_masks:
        return file.num_tokens > 1
    for start in range(1, file.num_tokens, _BLOCK):
        if file.read_mask(start, min(_BLOCK, file.num_tokens - start)).any():
            return True
    return False


def trained_tokens(file: TokenFile, offsets: np.ndarray) -> np.ndarray:
    """By document (n,), how many of its tokens are predicted and count; its first one never is.

    offsets: (n + 1,) of the documents. Reads all masks of a file that has some.
    """
    if not file.has_masks:
        return np.diff(offsets) - 1
    before = np.zeros(len(offsets), np.int64)  # set bits before each offset
    done = 0
    for start in range(0, file.num_tokens, _BLOCK):
        count = min(_BLOCK, file.num_tokens - start)
        bits = file.read_mask(start, count)
        first, last = np.searchsorted(offsets, (start, start + count), side="left")
        firsts = offsets[first : min(last, len(offsets) - 1)] - start
        bits[firsts] = False
        upto = np.cumsum(bits, dtype=np.int64)
        inside = np.searchsorted(offsets, (start, start + count), side="right")
        before[slice(*inside)] = done + upto[offsets[slice(*inside)] - start - 1]
        done += int(upto[-1])
    return np.diff(before)


def trained_targets(file: TokenFile, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Of parts of documents (n,), how many of the tokens that theirs predict count.

    counts: (n,), how many they predict; the first one is behind a part's first token. Reads only
    the masks of these.
    """
    pairs = zip((starts + 1).tolist(), counts.tolist(), strict=True)
    return np.array([file.read_mask(*pair).sum() for pair in pairs], np.int64)
