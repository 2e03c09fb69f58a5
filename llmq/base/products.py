"""Products of matrices by NumPy, on request a few rows at a time.

A BLAS library sums a row of a product in an order that may depend on the row's place and on the
number of rows.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

TILE = 8  # rows of a product that every BLAS library sums in the same order
_tiles = threading.local()


@contextmanager
def products_in_tiles() -> Iterator[None]:
    """In this thread, within the `with` block, a row's bits in `product` depend on no other row."""
    _tiles.on = True
    try:
        yield
    finally:
        _tiles.on = False


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return a (M, K) @ b (K, N) or (K,), written to `out` if given."""
    if not getattr(_tiles, "on", False):
        return np.matmul(a, b, out=out)
    tiles = np.zeros((-(-len(a) // TILE), TILE, a.shape[1]), a.dtype)
    tiles.reshape(-1, a.shape[1])[: len(a)] = a
    found = (tiles @ b).reshape(-1, *b.shape[1:])[: len(a)]
    if out is None:
        return found
    out[...] = found
    return out
