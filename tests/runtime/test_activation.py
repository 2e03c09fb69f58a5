"""The sigmoids of kernels whose results are in BF16, for all numbers of BF16."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16
from llmq.ops.pointwise import gelu, swiglu
from tests.harness import run

X = np.arange(1 << 16, dtype=np.uint16).view(BF16.numpy).reshape(256, 256)
ONE = np.ones_like(X)
with np.errstate(invalid="ignore"):  # of NaN
    EXACT = X.astype(np.float64)
ERROR = 1e-5  # of a sigmoid, relative; results are rounded by up to 2^-9
C1, C3 = 2 * np.sqrt(2 / np.pi), 2 * np.sqrt(2 / np.pi) * 0.044715


def _share(name: str) -> np.ndarray:
    """The factor of x, F64; 0 where it is no normal number of F32."""
    with np.errstate(all="ignore"):
        s = 1 / (1 + np.exp(-EXACT if name == "silu" else -(EXACT * EXACT * C3 + C1) * EXACT))
        return np.where(s < 2.0**-126, 0, s)


def _forward(dev, name: str) -> np.ndarray:
    """x * s."""
    arrays = {"out": ONE, "x": X}
    if name == "gelu":
        return run(dev, gelu.forward, arrays)["out"]
    arrays = {"out": ONE, "up_gate": np.hstack([ONE, X])}
    return run(dev, swiglu.forward, arrays)["out"]


def _backward(dev, name: str) -> np.ndarray:
    """d(x * s) / dx."""
    if name == "gelu":
        return run(dev, gelu.backward, {"d_x": ONE, "d_out": ONE, "x": X})["d_x"]
    wide = np.hstack([ONE, X])
    arrays = {"d_up_gate": np.ones_like(wide), "d_out": ONE, "up_gate": wide}
    return run(dev, swiglu.backward, arrays)["d_up_gate"][:, 256:]


def _check(got: np.ndarray, want: np.ndarray, error: np.ndarray, where: np.ndarray) -> None:
    """got is rounded from a number that is not further than `error` from what is wanted."""
    low, high = ((want + sign * error)[where].astype(np.float32) for sign in (-1, 1))
    got, low, high = (x.astype(BF16.numpy).astype(np.float32) for x in (got[where], low, high))
    assert (low <= got).all()
    assert (got <= high).all()


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_forward(dev, name):
    got, s, finite = _forward(dev, name), _share(name), np.isfinite(EXACT)
    with np.errstate(invalid="ignore"):
        _check(got, EXACT * s, np.abs(EXACT * s) * ERROR, finite)
    assert (got[finite & (s == 0)] == 0).all()
    assert (got[EXACT == -200] == 0).all()
    assert (got[np.isposinf(EXACT)] == np.inf).all()
    assert np.isnan(got[np.isnan(EXACT) | np.isneginf(EXACT)]).all()  # -inf: -inf * 0


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_backward(dev, name):
    got, s = _backward(dev, name), _share(name)
    near = np.abs(EXACT) < 2.0**40  # x^3 is finite
    with np.errstate(all="ignore"):
        bend = EXACT * s * (1 - s) * (1 if name == "silu" else 3 * C3 * EXACT * EXACT + C1)
        # 1 - s has the errors of both of its terms.
        _check(got, s + bend, 2 * ERROR * (s + np.abs(bend)), near)
    assert (got[near & (s == 0)] == 0).all()
    assert np.isnan(got[np.isnan(EXACT)]).all()
