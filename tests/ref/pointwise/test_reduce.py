"""Reference of adding to a gradient."""

from itertools import combinations

import numpy as np

from llmq.base.dtypes import BF16
from llmq.ref.common import gradient_bits
from llmq.ref.pointwise.reduce import reduce_sum
from tests.harness import step_scalars


def reduce_add(d_sum, x, scalars, accumulate, salt, n):
    reduce_sum(d_sum, x, *[None] * 7, scalars, accumulate, salt, 0, n)


def test_f32_adds_or_overwrites_exactly(rng):
    d_sum, x = rng.normal(size=(2, 100)).astype(np.float32)
    want = d_sum + x
    reduce_add(d_sum, x, step_scalars(), 1, 0, 100)
    np.testing.assert_array_equal(d_sum, want)
    reduce_add(d_sum, x.astype(BF16.numpy), step_scalars(), 0, 0, 100)
    np.testing.assert_array_equal(d_sum, x.astype(BF16.numpy).astype(np.float32))


def test_small_additions_to_bf16_are_not_lost(rng):
    n, times = 4096, 64
    d_sum, x = np.ones(n, BF16.numpy), np.full(n, 1e-3, np.float32)
    for micro_step in range(times):
        words = step_scalars(seed=1, step=2, micro_step=micro_step)
        reduce_add(d_sum, x, words, 1, salt=3, n=n)
    # One addition is 1/8 of a BF16 step (2^-7) above 1: to nearest, all would be lost. A rounding
    # has a standard deviation of sqrt(1/8 * 7/8) steps; 5 sigma of the mean of their sums.
    sigma = np.sqrt(times * 7 / 64 / n) * 2**-7
    assert abs(d_sum.astype(np.float64).mean() - 1.064) < 5 * sigma


def test_sums_are_rounded_once(rng):
    n, count = 8192, 8
    parts = [np.full(n, 2.0**-11, BF16.numpy) for _ in range(count)]
    d_sum = np.ones(n, BF16.numpy)
    reduce_sum(d_sum, *parts, step_scalars(), 1, 3, 0, n)
    # 1 + 8 / 2^11 = 1 + 2^-8, in the middle of two BF16 numbers: one rounding, half of them up.
    assert set(np.unique(d_sum).tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs((d_sum > 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(n)  # 5 sigma


def test_neighbours_are_rounded_by_independent_bits():
    """Pairs of eight that share a hash fill 32 x 32 cells evenly, and each one's mean is a half."""
    bits = gradient_bits(1, 0, 1 << 22).reshape(-1, 8)
    deviation = np.abs(bits.mean(axis=0) / 2**16 - 0.5) * np.sqrt(12 * len(bits))
    assert deviation.max() < 4.5  # standard deviations
    for i, j in combinations((bits >> 11).astype(np.int64).T, 2):
        cells = np.bincount(32 * i + j, minlength=1024)
        expected = len(bits) / 1024
        excess = ((cells - expected) ** 2 / expected).sum() - 1023  # beyond that of random numbers
        assert excess < 0.05**2 * len(bits)  # 5 % of a cell, root of the mean square
