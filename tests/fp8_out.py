"""Checks of kernels with an optional FP8 result (llmq.base.operand.Fp8Out)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmq.base.dtypes import FP8_MAX, DType
from llmq.base.operand import Fp8Out, turned
from llmq.ref.common import FP8_NAN
from llmq.runtime.device import Device
from tests.abs_max import bits, largest
from tests.harness import run

LARGEST = {dtype: np.float32(largest) for dtype, largest in FP8_MAX.items()}
LAYOUTS = {"codes": (True, False), "transposed": (False, True), "both": (True, True)}
UNTOUCHED = 0xA5  # no NaN, in which an element that is not written would go unnoticed
BEFORE = 5  # saturated elements counted so far


def expected(values: np.ndarray, scale: np.float32, dtype: DType) -> tuple[np.ndarray, int]:
    """uint8 codes (rows, features) by ml_dtypes, and how many values saturate."""
    values = values.reshape(-1, values.shape[-1]).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values * (np.float32(1) / scale)
        codes = scaled.clip(-LARGEST[dtype], LARGEST[dtype]).astype(dtype.numpy).view(np.uint8)
    count = np.count_nonzero(np.abs(values) > LARGEST[dtype] * scale)
    return np.where(np.isnan(values), np.uint8(FP8_NAN), codes), count


def outputs(
    shape: tuple[int, ...], dtype: DType, layout: str, scale: np.float32
) -> dict[str, np.ndarray | None]:
    """Arrays of an Fp8Out for a result of this shape, with nothing written yet."""
    rows, features = int(np.prod(shape[:-1])), shape[-1]
    codes, transposed = LAYOUTS[layout]

    def empty(*shape: int) -> np.ndarray:
        return np.full(shape, UNTOUCHED, np.uint8).view(dtype.numpy)

    return {
        "codes": empty(rows, features) if codes else None,
        "transposed": empty(*turned((rows, features))) if transposed else None,
        "scale": np.array([scale], np.float32),
        "saturated": np.array([BEFORE], np.int32),
    }


def with_fp8(call: Callable) -> Callable:
    """call(dev, fp8=..., **tensors) as a function of the tensors of `outputs` and the others."""

    def wrapped(dev, codes, transposed, scale, saturated, **tensors):
        call(dev, fp8=Fp8Out(codes, transposed, scale, saturated), **tensors)

    return wrapped


def check_codes(got: dict, values: np.ndarray, dtype: DType, layout: str) -> int:
    """`got` has the codes of these values in this layout; returns how many have saturated."""
    codes, count = expected(values, got["scale"][0], dtype)
    wanted = LAYOUTS[layout]
    if wanted[0]:
        np.testing.assert_array_equal(got["codes"].view(np.uint8), codes)
    if wanted[1]:
        rows = np.zeros(turned(codes.shape), np.uint8)  # with zeros behind them
        rows[:, : len(codes)] = codes.T
        np.testing.assert_array_equal(got["transposed"].view(np.uint8), rows)
    assert got["saturated"] == BEFORE + count
    return count


def check_fp8(
    dev: Device,
    call: Callable,
    arrays: dict[str, np.ndarray | None],
    result: str,
    dtype: DType,
    layout: str,
) -> None:
    """call(dev, fp8=..., **tensors) gives the codes of what it stores in `result` without fp8.

    The same bits as the two steps, BF16 or F32 first and its codes after that: with and without
    saturation, also where `result` is None. All other results, abs_max too, must not change.
    """
    arrays = arrays | {"abs_max": np.zeros(1, np.float32)}
    plain = run(dev, call, arrays)
    peak = largest(plain[result][np.isfinite(plain[result].astype(np.float32))])
    for factor, keep in ((1.5, True), (1 / 8, False)):
        scale = np.float32(factor) * peak / LARGEST[dtype]
        operands = arrays | outputs(plain[result].shape, dtype, layout, scale)
        operands[result] = arrays[result] if keep else None
        got = run(dev, with_fp8(call), operands)
        count = check_codes(got, plain[result], dtype, layout)
        assert (count > np.isinf(plain[result].astype(np.float32)).sum()) == (factor < 1)
        for name in plain:
            if got[name] is not None:
                assert bits(got[name]) == bits(plain[name]), name
