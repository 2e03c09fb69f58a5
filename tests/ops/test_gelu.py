"""GELU on a device against the reference."""

import numpy as np
import pytest

from llmq.dtypes import BF16, F32, I32
from llmq.ops import gelu
from llmq.ref.gelu import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.abs_max import check_abs_max
from tests.harness import host_device, run

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("gpt2")}
# F32: expf of the C library, of NumPy and of CUDA differ by a few units in the last place, and the
# derivative cancels near its zero. BF16: that may move a rounding by one unit.
TOLERANCE = {F32: {"rtol": 2**-20, "atol": 2**-20}, BF16: {"rtol": 2**-7, "atol": 2**-20}}


def _inputs(rng, shape, dtype):
    x = rng.normal(size=shape) * 3
    x.reshape(-1)[:8] = [-200, -20, -5, 0, 5, 20, 200, -1]
    return x.astype(dtype.numpy), rng.normal(size=shape).astype(dtype.numpy)


def _compare(got, want, dtype):
    assert not np.isnan(got.astype(np.float32)).any()
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_forward(dev, rng, shape, dtype):
    x, _ = _inputs(rng, shape, dtype)
    arrays = {"out": np.full(shape, np.nan, dtype.numpy), "x": x}
    got = run(dev, gelu.forward, arrays)["out"]
    _compare(got, run(host_device(), gelu.forward, arrays)["out"], dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_backward(dev, rng, shape, dtype):
    x, d_out = _inputs(rng, shape, dtype)
    arrays = {"d_x": np.full(shape, np.nan, dtype.numpy), "d_out": d_out, "x": x}
    got = run(dev, gelu.backward, arrays)["d_x"]
    _compare(got, run(host_device(), gelu.backward, arrays)["d_x"], dtype)

    def in_place(dev, d_out, x):
        gelu.backward(dev, x, d_out, x)

    del arrays["d_x"]
    np.testing.assert_array_equal(run(dev, in_place, arrays)["x"], got)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_abs_max(dev, rng, shape, dtype):
    x, d_out = _inputs(rng, shape, dtype)
    arrays = {"out": np.full(shape, np.nan, dtype.numpy), "x": x}
    check_abs_max(dev, gelu.forward, arrays, stored="out", spoiled="x")
    arrays = {"d_x": np.full(shape, np.nan, dtype.numpy), "d_out": d_out, "x": x}
    check_abs_max(dev, gelu.backward, arrays, stored="d_x", spoiled="d_out")


def test_grid():
    assert gelu.grid(8, 2) == 1
    assert gelu.grid(512 * 8, 2) == 1
    assert gelu.grid(512 * 8 + 8, 2) == 2


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    with pytest.raises(TypeError, match=r"gelu\.forward: x must be F32 or BF16, got I32"):
        gelu.forward(dev, make((8,), I32), make((8,), I32))
    with pytest.raises(TypeError, match=r"gelu\.forward: out must be BF16, got F32"):
        gelu.forward(dev, make((8,), F32), make((8,), BF16))
    with pytest.raises(ValueError, match=r"gelu\.forward: x must have a multiple of 16 bytes"):
        gelu.forward(dev, make((12,), BF16), make((12,), BF16))
    with pytest.raises(ValueError, match=r"gelu\.backward: d_out must have shape \(8,\)"):
        gelu.backward(dev, make((8,), F32), make((4,), F32), make((8,), F32))
