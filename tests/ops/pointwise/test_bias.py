"""Column sums on a device against the reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Accumulator
from llmq.ops.pointwise import reduce
from llmq.ref.pointwise.reduce import BIAS_CASES as CASES
from tests.harness import host_device, run, step_scalars

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}


def _call(accumulate):
    def call(dev, d_bias, d_out, scalars):
        reduce.bias_gradient(dev, Accumulator(d_bias, accumulate, scalars, salt=4), d_out)

    return call


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("target, source", [(F32, F32), (BF16, F32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("rows, N", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, rows, N, target, source, accumulate):
    start = rng.normal(size=N) if accumulate else np.full(N, np.nan)
    arrays = {
        "d_bias": start.astype(target.numpy),
        # Multiples of 1/64: F32 sums of them are exact in any order, so the results are equal.
        "d_out": (rng.integers(-64, 65, (rows, N)) / 64).astype(source.numpy),
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
    }
    got, want = run(dev, _call(accumulate), arrays), run(host_device(), _call(accumulate), arrays)
    assert np.isfinite(want["d_bias"].astype(np.float32)).all()
    np.testing.assert_array_equal(got["d_bias"], want["d_bias"])


def test_sums_in_f32_in_a_fixed_order(dev, rng):
    arrays = {
        "d_bias": np.full(136, np.nan, np.float32),
        "d_out": rng.normal(size=(2, 350, 136)).astype(np.float32),
        "scalars": step_scalars(),
    }
    first = run(dev, _call(False), arrays)["d_bias"]
    np.testing.assert_array_equal(run(dev, _call(False), arrays)["d_bias"], first)
    want = arrays["d_out"].astype(np.float64).sum(axis=(0, 1))
    # 700 terms of size 1, about 40 of them in sequence: a few units in the last place of the sum.
    np.testing.assert_allclose(first, want, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 63, 64, 129, 700, 32768])
@pytest.mark.parametrize("N", [8, 1152, 28672])
def test_grid_covers_all_rows(rows, N):
    tiles, splits = reduce.bias_grid(rows, N, 8, 132)
    step = -(-rows // splits)
    assert tiles * 128 >= N > (tiles - 1) * 128
    assert splits * step >= rows > (splits - 1) * step
    assert splits == 1 or (step >= 64 and tiles * splits <= 3 * 132)
