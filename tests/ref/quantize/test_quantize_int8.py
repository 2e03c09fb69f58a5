"""References of signed bytes: what codes stand for, and how they are rounded."""

import numpy as np

from llmq.ref.quantize.quantize_int8 import (
    quantize_int8_column_max,
    quantize_int8_columns,
    quantize_int8_rows,
)
from tests.harness import step_scalars

ROWS, COLS = 48, 64


def by_rows(x, factors=None, scalars=None, salt=0, sequence=ROWS):
    q, scale = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
    quantize_int8_rows(q, scale, x, factors, scalars, salt, sequence, *x.shape)
    return q, scale


def by_columns(x, scalars=None, salt=0, sequence=ROWS):
    q_t, scale = np.empty(x.shape[::-1], np.int8), np.empty(x.shape[1], np.float32)
    largest = np.zeros(x.shape[1], np.float32)
    quantize_int8_column_max(largest, x, *x.shape)
    quantize_int8_columns(q_t, scale, x, largest, scalars, salt, sequence, *x.shape)
    return q_t, scale


def test_codes_times_scale_are_the_nearest(rng):
    x = (rng.normal(size=(ROWS, COLS)) * 2.0 ** rng.integers(-20, 20, (ROWS, 1))).astype(np.float32)
    q, scale = by_rows(x)
    np.testing.assert_array_equal(np.abs(q).max(axis=1), 127)
    # Half a step, and the rounding of F32 in 127 * scale.
    assert (np.abs(q * scale[:, None] - x) <= 0.50001 * scale[:, None]).all()


def test_columns_are_the_rows_of_the_transpose(rng):
    x = rng.normal(size=(ROWS, COLS)).astype(np.float32)
    for got, want in zip(by_columns(x), by_rows(np.ascontiguousarray(x.T)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_factors_come_first(rng):
    x, factors = rng.normal(size=(ROWS, COLS)), rng.uniform(0.1, 9.0, COLS)
    x, factors = x.astype(np.float32), factors.astype(np.float32)
    for got, want in zip(by_rows(x, factors), by_rows(x * factors), strict=True):
        np.testing.assert_array_equal(got, want)


def test_zeros_and_what_is_not_finite(rng):
    x = rng.normal(size=(ROWS, COLS)).astype(np.float32)
    x[0], x[1, 3], x[2, 4] = 0, np.inf, np.nan
    q, scale = by_rows(x)
    assert not q[:3].any()
    assert np.isfinite(scale[0]) and np.isnan(scale[1:3]).all() and np.isfinite(scale[3:]).all()
    q_t, scale = by_columns(x)
    assert not q_t[3:5].any()
    assert np.flatnonzero(np.isnan(scale)).tolist() == [3, 4]


def test_stochastic_rounding_has_the_right_mean():
    x = np.full((ROWS, 1024), 0.3, np.float32)
    x[:, ::2], x[:, 0] = -0.3, 127.0
    q, scale = by_rows(x, scalars=step_scalars(seed=1, step=2), salt=3)
    np.testing.assert_array_equal(scale, 1)
    assert set(np.unique(q)) == {-1, 0, 1, 127}
    # 48 * 512 choices: four standard deviations are 0.012.
    assert abs(q[:, 1::2].mean() - 0.3) < 0.012
    assert abs(q[:, 2::2].mean() + 0.3) < 0.012
    whole = np.rint(x * 100)  # what needs no rounding gets none
    whole[:, 0] = -127
    np.testing.assert_array_equal(by_rows(whole, scalars=step_scalars())[0], whole)


def test_random_numbers_belong_to_seed_step_salt_and_sequence(rng):
    x = rng.normal(size=(ROWS, COLS)).astype(np.float32)
    scalars = {"seed": 7, "step": 3, "first_sequence": 4, "sequence_stride": 1}

    def codes(x, salt=5, **changed):
        return by_rows(x, scalars=step_scalars(**scalars | changed), salt=salt, sequence=16)[0]

    whole = codes(x)
    for other in (codes(x, seed=8), codes(x, step=4), codes(x, salt=6), codes(x, first_sequence=0)):
        assert 0.1 < np.mean(whole != other) < 0.6
    # The second of two ranks has sequence 5 of the step, then 7.
    part = codes(x[16:32], first_sequence=5, sequence_stride=2)
    np.testing.assert_array_equal(part, whole[16:32])
    np.testing.assert_array_equal(
        by_columns(x, step_scalars(**scalars), 5, 16)[0].shape, (COLS, ROWS)
    )
