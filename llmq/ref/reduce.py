"""Reference of adding to a gradient."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import compute, store_gradient

CASES = {"one": (1,), "ragged": (1003,), "several_blocks": (70, 129), "qwen05b": (14912384,)}


def reduce_add(
    d_sum: np.ndarray, x: np.ndarray, scalars: np.ndarray, accumulate: int, salt: int, n: int
) -> None:
    """d_sum += x (or = x), rounded as llmq.runtime.tensor.Accumulator says."""
    store_gradient(d_sum, compute(x), scalars, bool(accumulate), salt)
