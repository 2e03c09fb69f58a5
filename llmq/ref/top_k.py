"""The reference of cu/top_k.cu: the largest logits of each row."""

import numpy as np

from llmq.ref.common import compute

# rows, V, Vp, k
CASES = {
    "smallest": (2, 9, 16, 1),
    "few": (3, 257, 320, 8),
    "many": (2, 5000, 5056, 64),
    "all": (1, 40, 64, 40),
    "qwen": (2048, 151936, 151936, 64),
}


def top_k(
    told: np.ndarray,
    logits: np.ndarray,
    lse: np.ndarray,
    rows: int,
    vocab: int,
    padded_vocab: int,
    k: int,
) -> None:
    """told (rows, 2 k): the columns of the largest logits, ascending, and their logarithms."""
    for row in range(rows):
        x = compute(logits[row, :vocab])
        largest = np.sort(np.argsort(-x, kind="stable")[:k])
        told[row, :k] = largest.astype(np.int32).view(np.float32)
        told[row, k:] = x[largest] - lse[row]
