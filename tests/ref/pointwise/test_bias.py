"""References of bias against plain sums."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16
from llmq.ref.common import store_gradient
from llmq.ref.pointwise import reduce as ref
from tests.harness import step_scalars


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("rows, N, splits", [(1, 8, 1), (77, 200, 5), (64, 16, 8)])
def test_column_sums(rows, N, splits, accumulate):
    rng = np.random.default_rng(rows)
    d_out, before = rng.normal(size=(rows, N)), rng.normal(size=N)
    partial, d_bias = np.full((splits, N), np.nan), before.copy()
    ref.bias_backward(partial, d_out, rows, N, splits)
    ref.column_sum(d_bias, partial, step_scalars(), splits, N, accumulate, 0)
    # F64: only the order of the additions differs.
    np.testing.assert_allclose(d_bias, d_out.sum(axis=0) + accumulate * before, rtol=1e-12)


def test_adding_to_bf16_rounds_stochastically():
    scalars = step_scalars(seed=3, step=5, micro_step=1)
    before = np.linspace(1, 2, 16).astype(BF16.numpy)
    partial = np.full((2, 16), 1e-3, np.float32)
    got, want = before.copy(), before.copy()
    ref.column_sum(got, partial, scalars, 2, 16, 1, 7)
    store_gradient(want, np.full(16, 2e-3, np.float32), scalars, True, 7)
    np.testing.assert_array_equal(got, want)
    assert np.any(got != before) and np.any(got == before)
