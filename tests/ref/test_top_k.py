"""The largest logits in NumPy."""

import numpy as np

from llmq.ref.top_k import top_k


def test_ascending_columns_of_the_largest():
    logits = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [1, 1, 1, 1, 0, 2, 7, 7]], np.float32)
    told = np.empty((2, 6), np.float32)
    top_k(told, logits, np.array([1, 2], np.float32), 2, 7, 8, 3)
    assert told[:, :3].view(np.int32).tolist() == [
        [2, 4, 5],
        [0, 5, 6],
    ]  # the last column is padding
    assert told[:, 3:].tolist() == [[3, 4, 8], [-1, 0, 5]]
