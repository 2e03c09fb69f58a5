"""The reference of scales from history against what it should be, step by step."""

import numpy as np

from llmq.base.dtypes import STAT, STATS
from llmq.ref.quantize import fp8_scale as ref


def test_scale_follows_the_largest_of_the_last_steps():
    history, scales = np.zeros((3, 1), np.float32), np.full((1, 4), np.nan, np.float32)
    limits = np.array([224], np.float32)
    seen = []
    for value in (2, 8, 1, 1, 1, 16):
        abs_maxes = np.array([[value, 7, 7, 7]], np.float32)
        ref.fp8_scale_update(scales, None, history, abs_maxes, limits, 3, 1)
        seen.append(scales[0, 0] * 224)
    np.testing.assert_array_equal(seen, [2, 8, 8, 8, 1, 16])  # 8 counts for three steps
    np.testing.assert_array_equal(history[:, 0], [1, 1, 16])
    assert np.isnan(scales[0, 1:]).all()


def test_nothing_seen_and_nothing_finite():
    limits, scales = np.full(4, 448, np.float32), np.zeros((4, 4), np.float32)
    history = np.zeros((2, 4), np.float32)
    abs_maxes = np.zeros((4, 4), np.float32)
    abs_maxes[:, 0] = [0, np.inf, np.nan, 1e-30]
    ref.fp8_scale_update(scales, None, history, abs_maxes, limits, 2, 4)
    np.testing.assert_array_equal(scales[:3, 0], 1)
    assert scales[3, 0] == np.float32(1e-10) / np.float32(448)
    np.testing.assert_array_equal(history[1], np.array([0, 0, 0, 1e-30], np.float32))


def test_without_a_new_step_the_history_stays():
    history = np.array([[3.0], [5.0]], np.float32)
    scales, factors = np.zeros((2, 1, 4), np.float32)
    ref.fp8_scale_update(scales, factors, history, None, np.array([10], np.float32), 2, 1)
    np.testing.assert_array_equal(history, [[3], [5]])
    assert (scales[0, 0], factors[0, 0]) == (0.5, 2)


def test_counts_have_no_sign():
    stats = np.arange(len(STATS), dtype=np.float64)
    saturated = np.full((2, 4), 9, np.int32)
    saturated[:, 0] = [5, -1]
    abs_maxes = np.ones((2, 4), np.float32)
    ref.fp8_scale_count(stats, saturated, abs_maxes, 2)
    assert stats[STAT["saturated"]] == STAT["saturated"] + 5 + 2**32 - 1
    assert stats[STAT["norm_squared"]] == STAT["norm_squared"]
    abs_maxes[1, 0] = np.inf
    ref.fp8_scale_count(stats, saturated, abs_maxes, 2)
    assert np.isnan(stats[STAT["norm_squared"]])
