"""Reference of the moving average: a mean of all weights so far, which is given back."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ref.pointwise.elementwise import average_exchange, average_update
from tests.harness import step_scalars


def test_it_weighs_what_there_was(rng):
    """Values are weighed by powers of the decay, after a start with a smaller decay."""
    weights = rng.normal(size=(40, 128)).astype(np.float32)
    average = weights[0].copy()
    of_each = np.zeros(40)
    of_each[0] = 1
    for step, param in enumerate(weights):
        average_update(average, param, step_scalars(step=step), 0.8, 128)
        decay = min(0.8, (1 + step) / (10 + step))
        of_each *= decay
        of_each[step] += 1 - decay
    assert of_each.sum() == pytest.approx(1) and of_each[0] < 1e-8
    np.testing.assert_allclose(average, of_each @ weights, rtol=1e-4, atol=1e-5)
    kept = average.copy()
    average_update(average, weights[0], step_scalars(step=40, skip_update=1), 0.8, 128)
    np.testing.assert_array_equal(average, kept)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_exchange_gives_all_bits_back(rng, dtype):
    """Also of an average that lies between two numbers of BF16."""
    average = (rng.normal(size=4096) * 10.0 ** rng.integers(-38, 38, 4096)).astype(np.float32)
    average.view(np.uint32)[::3] = average.view(np.uint32)[::3] & 0xFFFF0000 | 0x8000
    param = rng.normal(size=4096).astype(dtype.numpy)
    word, shown = average.copy(), param.copy()
    average_exchange(word, shown, 0, 4096)
    error = np.abs(shown.astype(np.float64) - average)
    nearest = np.abs(average.astype(dtype.numpy).astype(np.float64) - average)
    np.testing.assert_array_equal(error, nearest)
    average_exchange(word, shown, 1, 4096)
    np.testing.assert_array_equal(word.view(np.uint32), average.view(np.uint32))
    np.testing.assert_array_equal(shown, param)
