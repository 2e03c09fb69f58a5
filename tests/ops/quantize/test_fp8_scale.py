"""Scales from history on a device: the same bits as the reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import F32, F64, FP8, I32, STAT, STATS
from llmq.ops.quantize import fp8_scale, quantize
from llmq.ref.quantize.fp8_scale import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run


@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("length, n", CASES.values(), ids=CASES)
def test_update(dev, rng, length, n, newest):
    def magnitudes(*shape):
        return (10.0 ** rng.uniform(-12, 4, shape)).astype(np.float32)

    history, abs_maxes = magnitudes(length, n), magnitudes(n, 4)
    history[:, ::7] = 0
    abs_maxes[::5, 0] = np.resize([0, np.inf, np.nan], len(abs_maxes[::5]))
    arrays = {
        "scales": np.full((n, 4), 7, np.float32),
        "factors": np.full((n, 4), 7, np.float32),
        "history": history,
        "limits": np.resize(np.float32([224, 28672]), n),
        "abs_maxes": abs_maxes if newest else None,
    }
    got, want = (
        run(dev, fp8_scale.update, arrays),
        run(host_device(), fp8_scale.update, arrays),
    )
    for name in ("scales", "factors", "history"):
        np.testing.assert_array_equal(got[name], want[name])
    np.testing.assert_array_equal(got["scales"][:, 1:], 7)
    np.testing.assert_array_equal(got["factors"][:, 1:], 7)
    np.testing.assert_array_equal(got["factors"][:, 0], np.float32(1) / got["scales"][:, 0])
    without = run(dev, fp8_scale.update, arrays | {"factors": None})
    np.testing.assert_array_equal(without["scales"], got["scales"])
    assert np.isfinite(got["scales"]).all() and (got["scales"] > 0).all()
    assert newest == (got["history"] != history).any() or length == n == 1


@pytest.mark.parametrize("spoiled", [1.0, np.inf, np.nan])
@pytest.mark.parametrize("n", [1, 32, 300])
def test_count(dev, rng, n, spoiled):
    saturated = rng.integers(-(2**31), 2**31, (n, 4)).astype(np.int32)
    abs_maxes = np.full((n, 4), np.nan, np.float32)  # only the first of a row counts
    abs_maxes[:, 0] = rng.uniform(size=n)
    abs_maxes[n // 2, 0] = spoiled
    stats = np.arange(len(STATS), dtype=np.float64)
    arrays = {"stats": stats, "saturated": saturated, "abs_maxes": abs_maxes}
    want = stats.copy()
    want[STAT["saturated"]] += sum(int(count) % 2**32 for count in saturated[:, 0])
    if spoiled != 1:
        want[STAT["norm_squared"]] = np.nan
    for device in (dev, host_device()):
        np.testing.assert_array_equal(run(device, fp8_scale.count, arrays)["stats"], want)


@pytest.mark.parametrize("largest", [0.0, 1e-12, 3.0, np.inf, np.nan])
def test_now_is_the_scale_of_quantize(dev, largest):
    abs_max = np.float32([largest])
    for device in (dev, host_device()):
        for dtype in FP8:
            q, x = np.zeros(16, dtype.numpy), np.zeros(16, np.float32)
            scales = {"scale": np.zeros(1, np.float32), "abs_max": abs_max}
            got = run(device, partial(fp8_scale.now, dtype=dtype), scales)["scale"]
            want = run(device, quantize.quantize, {"q": q, "q_t": None, "x": x} | scales)["scale"]
            np.testing.assert_array_equal(got, want)


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype=F32):
        return dev.alloc("x", shape, dtype, "Activations")

    scales, history, limits = make((5, 4)), make((16, 5)), make((5,))
    fp8_scale.update(dev, scales, history, limits, scales)
    with pytest.raises(ValueError, match="fp8_scale_count: statistics must be at least 6, got 5"):
        fp8_scale.count(dev, make((5,), F64), make((5, 4), I32), scales)
