"""Checks of kernels that have an optional result abs_max."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmq.runtime.device import Device
from tests.harness import host_device, run

LARGE = 1e30  # above what any of the tests stores


def largest(*arrays: np.ndarray) -> np.float32:
    """The largest magnitude; NaN if there is one."""
    return np.max([np.abs(a.astype(np.float32)).max() for a in arrays])


def bits(array: np.ndarray) -> bytes:
    """The bits as they are stored, all NaN taken for one: their signs depend on the compiler."""
    if array.dtype != np.int32:
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.tobytes()


def is_output(array: np.ndarray | None) -> bool:
    """Whether the array holds nothing yet."""
    return array is not None and bool(np.isnan(array.astype(np.float64)).all())


def check_abs_max(
    dev: Device,
    call: Callable,
    arrays: dict[str, np.ndarray | None],
    stored: str,
    spoiled: str,
) -> None:
    """call(dev, abs_max=..., **tensors) raises abs_max to the largest |value| of array `stored`.

    On the device and on the reference device; all other results must be the same bits as without
    abs_max. Also with zeros, and with an infinity or a NaN as the last element of array `spoiled`,
    which must get through to `stored`.
    """
    everything_zero = {k: v if v is None or is_output(v) else v * 0 for k, v in arrays.items()}
    for value in (None, 0, np.inf, np.nan):
        operands = everything_zero if value == 0 else {**arrays}
        if value:
            operands[spoiled] = arrays[spoiled].copy()
            operands[spoiled].reshape(-1)[-1] = value
        for device in (dev, host_device()):
            with np.errstate(invalid="ignore"):  # inf - inf and 0 * inf, in the reference
                plain = run(device, call, operands | {"abs_max": None})
                got = run(device, call, operands | {"abs_max": np.zeros(1, np.float32)})
                past = run(device, call, operands | {"abs_max": np.full(1, LARGE, np.float32)})
            abs_max = got.pop("abs_max")
            np.testing.assert_array_equal(abs_max[0], largest(got[stored]))
            np.testing.assert_array_equal(past["abs_max"], np.maximum(abs_max, np.float32(LARGE)))
            if value is None:
                assert 0 < abs_max[0] < LARGE
            elif value == np.inf:  # or NaN, where a factor of it has rounded to zero
                assert not np.isfinite(abs_max[0])
            else:
                np.testing.assert_array_equal(abs_max[0], value)
            for name, array in got.items():
                if array is not None:
                    assert bits(array) == bits(plain[name]), name
