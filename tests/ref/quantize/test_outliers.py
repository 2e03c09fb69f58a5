"""Outliers in NumPy: what is taken and what is left are the whole product."""

import numpy as np

from llmq.ref.quantize.quantize_int8 import outliers_select, outliers_take, outliers_weight


def test_products_are_divided(rng):
    x = rng.normal(size=(32, 64)).astype(np.float32)
    x[:, [5, 40]] *= 30
    q, scale = rng.integers(-127, 128, (16, 64)).astype(np.int8), np.full(16, 0.1, np.float32)
    mask, index = np.full(64, np.nan, np.float32), np.full(8, 9, np.int32)
    outliers_select(mask, index, np.abs(x).max(axis=0), 6.0, 8, 64)
    assert index.tolist() == [5, 40, *[-1] * 6]
    taken, weight = np.empty((32, 8), np.float32), np.empty((16, 8), np.float32)
    outliers_take(taken, x, index, 32, 64, 8)
    outliers_weight(weight, q, scale, index, 16, 64, 8)
    whole = q * scale[:, None]
    want = x @ whole.T
    np.testing.assert_allclose((x * mask) @ whole.T + taken @ weight.T, want, rtol=1e-4, atol=1e-3)


def test_more_than_there_is_room_for():
    """The largest are taken."""
    largest = np.array([7, 9, 8, 9, 1, 10, np.nan, 0], np.float32)
    mask, index = np.empty(8, np.float32), np.empty(4, np.int32)
    outliers_select(mask, index, largest, 6.0, 4, 8)
    assert index.tolist() == [1, 3, 5, 6]  # 8 is the first that has no room
    outliers_select(mask, index[:3], largest, 6.0, 3, 8)
    assert index[:3].tolist() == [5, 6, -1]  # two of 9: neither
