"""The largest magnitude on a device against the reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E4M3_MAX, E5M2, E5M2_MAX, F32
from llmq.ops.quantize import fp8_scale
from llmq.ref.quantize.fp8_scale import ABS_MAX_CASES as CASES
from llmq.ref.quantize.quantize import quantize as reference
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}


def largest(dev, x, start=0.0):
    arrays = {"abs_max": np.array([start], np.float32), "x": x}
    return run(dev, fp8_scale.abs_max, arrays)["abs_max"]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, shape, dtype):
    x = rng.normal(size=shape).astype(dtype.numpy)
    want = largest(host_device(), x)
    assert want == np.abs(x.astype(np.float32)).max()
    np.testing.assert_array_equal(largest(dev, x), want)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("place", [0, 1, 2, 7, 8, 4095, 70001, 140_000, 140_002])
def test_finds_it_anywhere(dev, rng, place, dtype):
    x = rng.normal(size=CASES["loop"]).astype(dtype.numpy)
    x[place] = -48
    assert largest(dev, x) == 48
    assert largest(dev, x, start=49) == 49


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_special_values(dev, dtype):
    x = np.full(1000, -0.0, dtype.numpy)
    assert largest(dev, x).view(np.uint32) == 0  # not the zero below zero
    x[999] = -1e-40  # a subnormal number in both formats
    assert largest(dev, x) == -np.float32(x[999])
    x[400] = -np.inf
    assert largest(dev, x) == np.inf
    for nan in (np.nan, -np.nan):
        x[700] = nan
        assert np.isnan(largest(dev, x))
    assert np.isnan(largest(dev, x[:1], start=np.nan))


@pytest.mark.parametrize("nbytes", [1, 16384, 16385, 10**8, 10**10])
def test_grid(nbytes):
    blocks = fp8_scale.grid(nbytes, 132)
    assert 1 <= blocks <= 8 * 132
    assert blocks == 8 * 132 or (blocks - 1) * 16384 < nbytes <= blocks * 16384


@pytest.mark.parametrize("world_size, n", [(1, 1), (2, 300), (8, 7)])
def test_combine(dev, rng, world_size, n):
    gathered = np.abs(rng.normal(size=(world_size, n))).astype(np.float32)
    gathered[0, 0], gathered[-1, n // 2] = np.nan, np.inf
    gathered[:, -1] *= n == 1
    arrays = {"out": np.full(n, -1, np.float32), "gathered": gathered.reshape(-1)}
    for device in (dev, host_device()):
        got = run(device, fp8_scale.combine, arrays)["out"]
        np.testing.assert_array_equal(got, gathered.max(axis=0))  # NaN is the largest for NumPy too


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_those_of_quantize(dev, dtype):
    values = np.array([0, 1e-30, 3e-10, 0.37, 448, 1e9, np.inf, np.nan], np.float32)
    arrays = {"scales": np.zeros(len(values), np.float32), "abs_maxes": values}
    largest = {E4M3: E4M3_MAX, E5M2: E5M2_MAX}[dtype]
    for device in (dev, host_device()):
        got = run(device, lambda d, **a: fp8_scale.scales(d, **a, largest=largest), arrays)[
            "scales"
        ]
        for value, scale in zip(values, got, strict=True):
            alone = np.zeros(1, np.float32)
            reference(np.zeros(16, dtype.numpy), alone, np.zeros(16, np.float32), value[None], 16)
            np.testing.assert_array_equal(scale, alone[0], err_msg=str(value))


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    with pytest.raises(ValueError, match="abs_max: n must be at least 1, got 0"):
        fp8_scale.abs_max(dev, make((1,), F32), make((0, 8), F32))
    x = dev.alloc("x", (8,), F32, "Activations")
    fp8_scale.abs_max(dev, make((1,), F32), x)
    assert dev.bytes["abs_max"] == 8 * 4 + 2 * 4
