"""Reference of adapters' B in one matrix: products with it are those of each adapter."""

import numpy as np

from llmq.ref.adapter import adapter_collect, adapter_expand


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
