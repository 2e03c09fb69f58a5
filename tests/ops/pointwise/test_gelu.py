"""GELU on a device against the reference."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, I32
from llmq.base.operand import Fp8Out
from llmq.ops.pointwise import gelu
from llmq.ref.pointwise.gelu import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.abs_max import check_abs_max
from tests.again import AGAIN_WITH_FP8, FP8_CASES, check_again, compare
from tests.fp8_out import check_fp8
from tests.harness import GPU_SPEC, host_device, run

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("gpt2")}


def _inputs(rng, shape, dtype):
    x = rng.normal(size=shape) * 3
    x.reshape(-1)[:8] = [-200, -20, -5, 0, 5, 20, 200, -1]
    return x.astype(dtype.numpy), rng.normal(size=shape).astype(dtype.numpy)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_forward(dev, rng, shape, dtype):
    x, _ = _inputs(rng, shape, dtype)
    arrays = {"out": np.full(shape, np.nan, dtype.numpy), "x": x}
    got = run(dev, gelu.forward, arrays)["out"]
    compare(got, run(host_device(), gelu.forward, arrays)["out"], dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_backward(dev, rng, shape, dtype):
    x, d_out = _inputs(rng, shape, dtype)
    arrays = {"d_x": np.full(shape, np.nan, dtype.numpy), "d_out": d_out, "x": x}
    got = run(dev, gelu.backward, arrays)["d_x"]
    compare(got, run(host_device(), gelu.backward, arrays)["d_x"], dtype)

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


@FP8_CASES
def test_fp8_equals_two_steps(dev, rng, name, dtype, format, layout):
    shape = CASES[name]
    x, d_out = _inputs(rng, shape, dtype)
    x.reshape(-1, shape[-1])[-2:, -1] = [np.inf, np.nan]
    empty = np.full(shape, np.nan, dtype.numpy)
    for device in (dev, host_device()):
        check_fp8(device, gelu.forward, {"out": empty, "x": x}, "out", format, layout)
        arrays = {"d_x": empty, "d_out": d_out, "x": x}
        check_fp8(device, gelu.backward, arrays, "d_x", format, layout)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["one_vector", "ragged_block"])
def test_out_again(dev, rng, name, dtype):
    x, d_out = _inputs(rng, CASES[name], dtype)
    for device in (dev, host_device()):
        check_again(device, gelu, x, d_out, d="new", out="new", abs_max=False)
        check_again(device, gelu, x, d_out, d="x", out="new")
        check_again(device, gelu, x, d_out, d="x", out="d_out", abs_max=False)


@AGAIN_WITH_FP8
def test_out_again_and_fp8(dev, rng, name, dtype, d, fp8, out):
    shape = CASES[name]
    x, d_out = _inputs(rng, shape, dtype)
    x.reshape(-1, shape[-1])[-2:, -1] = [np.inf, np.nan]
    for device in (dev, host_device()):
        check_again(device, gelu, x, d_out, d=d, out=out, fp8=fp8)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_square_of_relu(dev, rng, dtype):
    forward, backward = partial(gelu.forward, relu2=True), partial(gelu.backward, relu2=True)
    both = SimpleNamespace(forward=forward, backward=backward)
    x, d_out = _inputs(rng, CASES["ragged_tiles"], dtype)
    given = {"out": np.empty_like(x), "x": x}
    want = run(host_device(), forward, given)["out"]
    np.testing.assert_array_equal(run(dev, forward, given)["out"], want)
    given = {"d_x": np.empty_like(x), "d_out": d_out, "x": x}
    want = run(host_device(), backward, given)["d_x"]
    np.testing.assert_array_equal(run(dev, backward, given)["d_x"], want)
    x = rng.normal(size=x.shape).astype(x.dtype)
    check_again(dev, both, x, d_out, d="x", out="fp8", fp8=E4M3)


def test_grid():
    assert gelu.grid(8, 2) == 1
    assert gelu.grid(512 * 8, 2) == 1
    assert gelu.grid(512 * 8 + 8, 2) == 2


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    with pytest.raises(ValueError, match=r"gelu.forward: n must be a multiple of 8 on a GPU"):
        gelu.forward(dev, make((12,), BF16), make((12,), BF16))


def test_wrong_fp8_arguments_and_traffic():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    def fp8(rows, columns):
        codes, transposed = make((rows, columns), E4M3), make((columns, rows), E4M3)
        return Fp8Out(codes, transposed, make((1,), F32), make((1,), I32))

    x = make((2, 16, 48), BF16)
    gelu.backward(dev, None, x, x, fp8=fp8(32, 48))
    assert dev.bytes == {"gelu_backward_fp8": 32 * 48 * 6 + 4 + 8}
    with pytest.raises(ValueError, match="columns must be a multiple of 16, got 40"):
        gelu.forward(dev, None, make((32, 40), BF16), fp8=fp8(32, 40))


def test_wrong_arguments_of_out_again_and_traffic():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    def fp8(codes, transposed):
        return Fp8Out(codes, transposed, make((1,), F32), make((1,), I32))

    x, again = make((2, 16, 48), BF16), fp8(None, make((48, 32), E4M3))
    gelu.backward(dev, x, x, x, out=make((2, 16, 48), BF16))
    assert dev.bytes == {"gelu_backward": 32 * 48 * 2 * 4}
    gelu.backward(dev, x, x, x, out_fp8=again)
    assert dev.bytes["gelu_backward_fp8"] == 32 * 48 * (2 * 3 + 1) + 4 + 8

    def refused(error, match, **again):
        with pytest.raises(error, match=r"gelu.backward(_fp8)?: .*" + match):
            gelu.backward(dev, x, x, x, **again)

    refused(TypeError, "out and out_fp8 are both given", out=x, out_fp8=again)
    both = fp8(make((32, 48), E4M3), again.transposed)
    refused(TypeError, "codes must be None", out_fp8=both)
