"""Helpers of the tests of the activations, above all the checks of a backward that also writes what
forward has made of its input.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, DType
from llmq.base.operand import Fp8Out
from llmq.runtime.device import Device
from tests.abs_max import bits, largest
from tests.fp8_out import LARGEST, check_codes, outputs
from tests.harness import run

LAYOUT = {"fp8": "both", "out_fp8": "transposed"}
# F32: expf of the C library, of NumPy and of CUDA differ by a few units in the last place, and the
# derivatives cancel near their zeros. BF16: that may move a rounding by one unit.
TOLERANCE = {F32: {"rtol": 2**-20, "atol": 2**-20}, BF16: {"rtol": 2**-7, "atol": 2**-20}}
# Names are of ref's CASES; the other arguments those of check_fp8, and of check_again.
FP8_CASES = pytest.mark.parametrize(
    "name, dtype, format, layout",
    [
        ("one_tile", BF16, E4M3, "both"),
        ("ragged_tiles", BF16, E4M3, "both"),
        ("ragged_tiles", BF16, E4M3, "codes"),
        ("ragged_tiles", BF16, E5M2, "transposed"),
        ("ragged_tiles", F32, E4M3, "both"),
        ("rows_of_no_16", BF16, E4M3, "both"),
    ],
    ids=str,
)
AGAIN_WITH_FP8 = pytest.mark.parametrize(
    "name, dtype, d, fp8, out",
    [
        ("one_tile", BF16, "x", None, "fp8"),
        ("ragged_tiles", BF16, "x", None, "fp8"),
        ("ragged_tiles", F32, "new", None, "fp8"),
        ("one_tile", BF16, None, E5M2, "fp8"),
        ("ragged_tiles", BF16, None, E5M2, "fp8"),
        ("ragged_tiles", BF16, "x", E4M3, "fp8"),
        ("rows_of_no_16", BF16, "x", E4M3, "fp8"),
        ("ragged_tiles", F32, "new", E5M2, "fp8"),
        ("ragged_tiles", BF16, None, E5M2, "new"),
        ("ragged_tiles", BF16, "x", E5M2, "d_out"),
        ("ragged_tiles", F32, "new", E4M3, "new"),
    ],
    ids=str,
)


def compare(got: np.ndarray, want: np.ndarray, dtype: DType) -> None:
    """Compare what a device has computed with the reference."""
    assert not np.isnan(got.astype(np.float32)).any()
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), **TOLERANCE[dtype])


def separate(dev: Device, op: ModuleType, x: np.ndarray, d_out: np.ndarray) -> dict:
    """forward's result `out`, backward's `d` and its `abs_max`."""

    def call(dev, x, d_out, out, d, abs_max):
        op.forward(dev, out, x)
        op.backward(dev, d, d_out, x, abs_max=abs_max)

    empty = {"out": np.full_like(d_out, np.nan), "d": np.full_like(x, np.nan)}
    got = run(dev, call, {"x": x, "d_out": d_out, "abs_max": np.zeros(1, np.float32)} | empty)
    return {name: got[name] for name in ("out", "d", "abs_max")}


def fp8_arrays(name: str, values: np.ndarray, dtype: DType) -> dict[str, np.ndarray | None]:
    """Arrays of an Fp8Out in which some of the values saturate."""
    peak = largest(values[np.isfinite(values.astype(np.float32))])
    scale = np.float32(1 / 8) * peak / LARGEST[dtype]
    return {f"{name}.{k}": v for k, v in outputs(values.shape, dtype, LAYOUT[name], scale).items()}


def check_again(
    dev: Device,
    op: ModuleType,
    x: np.ndarray,
    d_out: np.ndarray,
    *,
    d: str | None,
    out: str,
    fp8: DType | None = None,
    abs_max: bool = True,
) -> None:
    """op.backward(..., out= or out_fp8=) gives the bits of forward and backward one by one.

    d: "new", "x" (over x), or None where there are only codes. fp8: the format of d's codes.
    out: "new", "d_out" (over d_out), or "fp8" for out_fp8.
    """
    want = separate(dev, op, x, d_out)
    arrays = {"x": x, "d_out": d_out}
    arrays |= {"d": np.full_like(x, np.nan)} if d == "new" else {}
    arrays |= {"out": np.full_like(d_out, np.nan)} if out == "new" else {}
    arrays |= {"abs_max": np.zeros(1, np.float32)} if abs_max else {}
    formats = {} if fp8 is None else {"fp8": (fp8, want["d"])}
    formats |= {"out_fp8": (E4M3, want["out"])} if out == "fp8" else {}
    for name, (dtype, values) in formats.items():
        arrays |= fp8_arrays(name, values, dtype)

    def call(dev, x, d_out, **tensors):
        for name in formats:
            parts = (tensors.pop(f"{name}.{field}") for field in Fp8Out._fields)
            tensors[name] = Fp8Out(*parts)
        tensors |= {"out": d_out} if out == "d_out" else {}
        op.backward(dev, x if d == "x" else tensors.pop("d", None), d_out, x, **tensors)

    got = run(dev, call, arrays)
    for array, result in (("x", "d"), ("d_out", "out")):
        if array in (d, out):
            got[result] = got[array]
        else:
            assert bits(got[array]) == bits(arrays[array]), array
    assert ("d" in got, "out" in got, "abs_max" in got) == (d is not None, out != "fp8", abs_max)
    for name in want.keys() & got.keys():
        assert bits(got[name]) == bits(want[name]), name
    for name, (dtype, values) in formats.items():
        codes = {field: got[f"{name}.{field}"] for field in Fp8Out._fields}
        assert check_codes(codes, values, dtype, LAYOUT[name]) > 1
