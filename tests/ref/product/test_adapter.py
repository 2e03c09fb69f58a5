"""Reference of adapters' B in one matrix: products with it are those of each adapter."""

import numpy as np

from llmq.ref.product.adapter import adapter_collect, adapter_columns, adapter_expand, adapter_norms


def test_products_are_those_of_each_adapter(rng):
    spans, rank, columns, rows = ((0, 6), (10, 16)), 3, 8, 16
    b = rng.normal(size=(12, rank)).astype(np.float32)
    h = rng.normal(size=(5, columns)).astype(np.float32)
    whole = np.full((rows, columns), np.nan, np.float32)
    rest = (2.0, 2.0, 0.0, 0.0, rank, columns, rows, rows, *spans[0], *spans[1], 0, 0, 0, 0)
    adapter_expand(whole, b, *rest)
    want = np.zeros((5, rows), np.float32)
    want[:, :6] = 2 * h[:, :3] @ b[:6].T
    want[:, 10:] = 2 * h[:, 3:6] @ b[6:].T
    np.testing.assert_allclose(h @ whole.T, want, rtol=1e-6, atol=1e-6)  # other order of sums
    # The gradient of <whole, m> in b is collect(m).
    m = rng.normal(size=whole.shape).astype(np.float32)
    d_b = np.full_like(b, np.nan)
    adapter_collect(d_b, m, *rest)
    np.testing.assert_allclose(np.sum(d_b * b), np.sum(m * whole), rtol=1e-5)  # F32 sums


def test_groups_are_matrices_of_their_own(rng):
    spans, rank, columns, rows, groups = ((0, 6), (10, 16)), 4, 8, 16, 3
    b = rng.normal(size=(groups, 12, rank)).astype(np.float32)
    rest = (0.5, 0.5, 0.0, 0.0, rank, columns, rows, rows, *spans[0], *spans[1], 0, 0, 0, 0)
    one_by_one = np.empty((groups, rows, columns), np.float32)
    for whole, part in zip(one_by_one, b, strict=True):
        adapter_expand(whole, part, *rest)
    at_once = np.empty((groups * rows, columns), np.float32)
    rest = (*rest[:6], groups * rows, *rest[7:])
    adapter_expand(at_once, b.reshape(-1, rank), *rest)
    np.testing.assert_array_equal(at_once.reshape(one_by_one.shape), one_by_one)
    back = np.empty_like(b).reshape(-1, rank)
    adapter_collect(back, at_once, *rest)
    np.testing.assert_array_equal(back, 0.25 * b.reshape(-1, rank))


def test_magnitudes_and_their_gradient(rng):
    """The sum of y * g has this gradient, where y = x * m / norms and the norms are constants."""
    w, a, b = (rng.normal(size=shape) for shape in ((8, 5), (8, 5), (6, 3)))
    norms, rest = np.full(8, np.nan), (2.0, 0.0, 0.0, 0.0, 3, 8, 5, 1, 7, 0, 0, 0, 0, 0, 0)
    adapter_norms(norms, w, a, b, *rest)
    want = np.linalg.norm(w[1:7] + 2 * b @ a[:3], axis=1)
    np.testing.assert_allclose(norms, [0, *want, 0])
    x, g, m = rng.normal(size=(4, 8)), rng.normal(size=(4, 8)), rng.uniform(1, 2, 8)

    def total(m):
        y = np.empty_like(x)
        adapter_columns(y, x, None, norms, m, None, 4, 8)
        return (y * g).sum()

    terms = np.empty_like(x)
    adapter_columns(terms, g, x, norms, None, None, 4, 8)
    step = 1e-6 * np.eye(8)
    found = [(total(m + e) - total(m - e)) / 2e-6 for e in step]
    np.testing.assert_allclose(terms.sum(axis=0), found, atol=1e-8)
