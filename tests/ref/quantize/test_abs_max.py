"""The reference of the largest magnitude."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ref.quantize.fp8_scale import abs_max


def largest(x, start=0.0):
    result = np.array([start], np.float32)
    abs_max(result, x, x.size)
    return result[0]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0, 70_000, 99_999])
def test_finds_it_anywhere(rng, dtype, sign, place):
    x = rng.normal(size=(1000, 100)).astype(dtype.numpy)
    x.reshape(-1)[place] = sign * 48
    assert largest(x) == 48
    assert largest(x, start=47) == 48
    assert largest(x, start=49) == 49


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_special_values(dtype):
    x = np.array([-0.0, -1e-40], dtype.numpy)  # a subnormal number in both
    assert largest(x[:1]) == 0 and not np.signbit(largest(x[:1]))
    assert largest(x) == -np.float32(x[1])
    x = np.array([1, -np.inf, 2], dtype.numpy)
    assert largest(x) == np.inf
    for nan in (np.nan, -np.nan):
        x[0] = nan
        assert np.isnan(largest(x))
    assert np.isnan(largest(x[2:], start=np.nan))
