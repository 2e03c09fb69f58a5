"""Operands for which every order of summation gives the same result, and exact comparison."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmq.base.dtypes import DType
from llmq.runtime.device import Device
from tests.harness import host_device, run


def coarse(rng: np.random.Generator, shape: int | tuple[int, ...], dtype: DType) -> np.ndarray:
    """Multiples of 1/4 up to 2: sums of products of three, up to 30000 of them, are exact in F32.

    (Multiples of 1/64 up to 8, so that 2^24 / (64 * 8) = 32768 terms stay below 2^24 steps.)
    """
    return (rng.integers(-8, 9, size=shape) / 4).astype(dtype.numpy)


def nan(shape: int | tuple[int, ...], dtype: DType) -> np.ndarray:
    """An output that nothing has written."""
    return np.full(shape, np.nan, dtype.numpy)


def run_exact(dev: Device, call: Callable, arrays: dict[str, np.ndarray | None]) -> dict:
    """tests.harness.run on the device; the reference device must give the same bits, and no NaN."""
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    for name, array in want.items():
        if array is not None:
            assert not np.isnan(array.astype(np.float64)).any(), f"{name} has NaN"
            np.testing.assert_array_equal(got[name], array, err_msg=name)
    return got
