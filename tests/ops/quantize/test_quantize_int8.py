"""Signed bytes on a device against their reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I8, I32
from llmq.base.operand import turned
from llmq.ops.quantize import quantize_int8
from llmq.ops.quantize.quantize_int8 import Stochastic
from llmq.ref.quantize.quantize_int8 import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run, step_scalars

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}
# Indices of more than 32 bits.
SCALARS = {"seed": 9, "step": 4, "first_sequence": 2**31, "sequence_stride": 3}


def matrix(rng, case, dtype):
    """With a row and a column of zeros, and of which some have no scale."""
    x = rng.normal(size=case) * 2.0 ** rng.integers(-30, 30, (case[0], 1))
    x[1], x[:, 2] = 0, 0
    for row, column, none in ((3, 5, np.inf), (4, 6, -np.inf), (5, 7, np.nan)):
        x[row:, column:][:1, :1] = none
    return x.astype(dtype.numpy)


def both(dev, call, arrays):
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    for name in {"q", "q_t", "scale"} & arrays.keys():
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    return got


def rounding(tensors, stochastic, rows):
    scalars = tensors.pop("scalars")
    return Stochastic(scalars, 11, rows if rows % 16 else rows // 4) if stochastic else None


WAYS = [(BF16, False, False), (BF16, True, True), (F32, True, False), (F32, False, True)]
# Each way and number of warps is a compilation: several warps take turns.
BY_WARPS = {"several_warps": WAYS[1:3], "sixteen_warps": WAYS[::3]}
ROW_CASES = [(name, *way) for name in SMALL for way in BY_WARPS.get(name, WAYS)]


@pytest.mark.parametrize(("name", "dtype", "stochastic", "factors"), ROW_CASES, ids=str)
def test_rows_equal_reference(dev, rng, name, dtype, stochastic, factors):
    rows, cols = case = SMALL[name]
    arrays = {
        "q": np.full(case, 99, np.int8),
        "scale": np.full(rows, np.nan, np.float32),
        "x": matrix(rng, case, dtype),
        "scalars": step_scalars(**SCALARS),
        "factors": rng.uniform(0.5, 3.0, cols).astype(np.float32) if factors else None,
    }

    def call(dev, **tensors):
        chosen = rounding(tensors, stochastic, rows)
        quantize_int8.rows(dev, **tensors, stochastic=chosen)

    got = both(dev, call, arrays)
    assert np.flatnonzero(np.isnan(got["scale"])).tolist() == [n for n in (3, 4, 5) if n < rows]
    assert np.abs(got["q"].astype(int)).max() == 127


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize(("dtype", "stochastic"), [(BF16, True), (F32, False)], ids=str)
def test_columns_equal_reference(dev, rng, case, dtype, stochastic):
    rows, cols = case
    arrays = {
        "q_t": np.full(turned(case), 99, np.int8),
        "scale": np.full(cols, np.nan, np.float32),
        "x": matrix(rng, case, dtype),
        "scalars": step_scalars(**SCALARS),
    }

    def call(dev, **tensors):
        chosen = rounding(tensors, stochastic, rows)
        quantize_int8.columns(dev, **tensors, stochastic=chosen)

    got = both(dev, call, arrays)
    assert np.flatnonzero(np.isnan(got["scale"])).tolist() == [n for n in (5, 6, 7) if n - 2 < rows]
    assert not got["q_t"][:, rows:].any()


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def tensor(dtype, *shape):
        return dev.alloc("t", shape, dtype, "Weights")

    x, q, scale = tensor(BF16, 32, 48), tensor(I8, 32, 48), tensor(F32, 32)
    quantize_int8.rows(dev, q, scale, x)
    with pytest.raises(
        ValueError, match="quantize_int8_rows: cols must be a multiple of 16, got 40"
    ):
        quantize_int8.rows(dev, tensor(I8, 32, 40), scale, tensor(BF16, 32, 40))
    wide = tensor(F32, 16, 32784)
    with pytest.raises(
        ValueError, match="quantize_int8_rows: cols must be at most 32768, got 32784"
    ):
        quantize_int8.rows(dev, tensor(I8, 16, 32784), tensor(F32, 16), wide)
    for sequence in (10, 12):
        chosen = Stochastic(tensor(I32, 16), 0, sequence)
        with pytest.raises(ValueError, match="quantize_int8: sequence must be a multiple of 4"):
            quantize_int8.rows(dev, q, scale, x, stochastic=chosen)
