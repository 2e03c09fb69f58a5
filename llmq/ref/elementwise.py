"""References of cu/elementwise.cu."""

import numpy as np

from llmq.ref.common import compute

CASES = {"one": (1,), "ragged": (1003,), "several_blocks": (70, 129), "qwen05b": (151936, 896)}


def add(out: np.ndarray, a: np.ndarray, b: np.ndarray, n: int) -> None:
    """out = a + b, rounded to nearest."""
    out[...] = compute(a) + compute(b)


def convert(out: np.ndarray, x: np.ndarray, n: int) -> None:
    """out = x in out's dtype, rounded to nearest."""
    out[...] = x


def fill(x: np.ndarray, value: float, n: int) -> None:
    """Every element becomes the value."""
    x[...] = value
