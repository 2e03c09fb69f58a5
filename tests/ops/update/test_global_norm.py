"""The gradient norm on a device against its reference."""

from dataclasses import replace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, F64, I32, STAT, STATS, STEP_SCALARS
from llmq.ops.update import global_norm
from llmq.ref.update.global_norm import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run, step_scalars

SMALL = {name: sizes for name, sizes in CASES.items() if not name.startswith("qwen")}


def squared(dev, stats, **xs):
    tensors = list(xs.values())
    count = sum(global_norm.num_partials(dev, x) for x in tensors)
    with dev.scratch("sums", (count,), F64) as sums:
        for x, part in zip(tensors, global_norm.split(dev, sums, tensors), strict=True):
            global_norm.partials(dev, part, x)
        global_norm.total(dev, stats, sums)


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_squared(dev, rng, case, dtype):
    xs = {f"x{i}": rng.normal(size=n).astype(dtype.numpy) for i, n in enumerate(SMALL[case])}
    arrays = xs | {"stats": np.arange(len(STATS), dtype=np.float64)}
    got, again = run(dev, squared, arrays)["stats"], run(dev, squared, arrays)["stats"]
    np.testing.assert_array_equal(got, again)
    # F32 sums of 16 to 64 squares on the device, of up to 64k by the host's BLAS; then F64.
    np.testing.assert_allclose(got, run(host_device(), squared, arrays)["stats"], rtol=1e-5)
    exact = STAT["norm_squared"] + sum(np.square(x.astype(np.float64)).sum() for x in xs.values())
    # Each of at most 32 additions rounds by half of 2^-23 of a partial sum that is positive.
    np.testing.assert_allclose(got[STAT["norm_squared"]], exact, rtol=32 * 2**-24)


def test_infinity_and_nan_reach_the_sum(dev):
    for value in (np.inf, np.nan):
        x = np.ones(5000, np.float32)
        x[4999] = value
        got = run(dev, squared, {"stats": np.zeros(len(STATS)), "x": x})["stats"]
        np.testing.assert_equal(got[STAT["norm_squared"]], value)


@pytest.mark.parametrize(
    "norm_squared, tokens, clip",
    [
        *((900, 10, 0), (900, 10, 5), (900, 7, 1.5), (0, 10, 1)),
        *((np.inf, 10, 1), (np.nan, 1, 1), (0, 0, 1), (900, 0, 0)),
    ],
)
def test_finish(dev, norm_squared, tokens, clip):
    stats = np.arange(len(STATS), dtype=np.float64)
    stats[STAT["norm_squared"]], stats[STAT["count"]] = norm_squared, tokens
    arrays = {"stats": stats, "scalars": step_scalars(grad_clip=clip, lr=3, skip_update=7)}
    got = run(dev, global_norm.finish, arrays)
    want = run(host_device(), global_norm.finish, arrays)
    np.testing.assert_array_equal(got["stats"], want["stats"])
    np.testing.assert_array_equal(got["scalars"], want["scalars"])


@pytest.mark.parametrize(
    "limits, skipped",
    [
        *(((0, 0), False), ((3, 0.5), False), ((2.999, 0.5), True), ((3, 0.4999), True)),
        *(((3.001, 0), False), ((2.999, 0), True), ((0, 0.6), False), ((0, 0.4), True)),
    ],
)
def test_limits_are_kept_or_nothing_changes(dev, limits, skipped):
    """A norm of 3 and a loss of 0.5, of 10 tokens."""
    stats = np.zeros(len(STATS))
    stats[[STAT["norm_squared"], STAT["count"], STAT["loss"]]] = 900, 10, 5
    values = dict(zip(("norm_limit", "loss_limit"), limits, strict=True))
    arrays = {"stats": stats, "scalars": step_scalars(grad_clip=1, **values)}
    for device in (dev, host_device()):
        got = run(device, global_norm.finish, arrays)["scalars"].view(STEP_SCALARS)[0]
        assert got["skip_update"] == skipped and (got["grad_scale"] == 0) == skipped


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_no_number_is_beyond_any_limit(dev, value):
    stats = np.zeros(len(STATS))
    stats[[STAT["norm_squared"], STAT["count"], STAT["loss"]]] = 900, 10, value
    for limit, skipped in ((0, 0), (1e30, 1)):
        arrays = {"stats": stats, "scalars": step_scalars(loss_limit=limit)}
        for device in (dev, host_device()):
            got = run(device, global_norm.finish, arrays)["scalars"].view(STEP_SCALARS)[0]
            assert got["skip_update"] == skipped


@pytest.mark.parametrize("world_size, size", [(1, 10), (2, 63), (5, 33)])
def test_combine(dev, rng, world_size, size):
    """Statistics of a loss of its own stand behind those of all."""
    shape = (world_size, size)
    gathered = rng.normal(size=shape) * 10.0 ** rng.uniform(-8, 8, shape)
    arrays = {"stats": np.full(size, np.nan), "gathered": gathered}
    want = np.zeros(size)
    for one in gathered:  # in this order: F64 sums of such numbers depend on it
        want += one
    maxima = [7, size - 1]
    want[maxima] = gathered[:, maxima].max(axis=0)

    def combine(dev, **tensors):
        global_norm.combine(dev, **tensors, maxima=maxima)

    for device in (dev, host_device()):
        np.testing.assert_array_equal(run(device, combine, arrays)["stats"], want)


@pytest.mark.parametrize(
    "nbytes, count", [(4, 2), (2 * global_norm.PER_BLOCK + 4, 4), (1 << 40, 8 * 132)]
)
def test_number_of_partial_sums(nbytes, count):
    dev = PlanDevice(replace(HOST_SPEC, num_sms=132))
    x = dev.alloc("x", (nbytes // 4,), F32, "Gradients")
    assert global_norm.num_partials(dev, x) == count


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)
    stats = dev.alloc("stats", (len(STATS),), F64, "Gradients")
    scalars = dev.alloc("scalars", (16,), I32, "Gradients")
    x = dev.alloc("x", (5,), F32, "Gradients")
    sums = dev.alloc("sums", (2,), F64, "Gradients")
    with pytest.raises(ValueError, match=r"global_norm: sums must have shape \(0,\), got \(2,\)"):
        global_norm.partials(dev, sums, dev.alloc("x", (0,), F32, "Gradients"))
    with pytest.raises(ValueError, match="global_norm: sums must have shape"):
        global_norm.partials(dev, sums.rows(0, 1), x)
    with pytest.raises(
        ValueError, match="global_norm_finish: statistics must be at least 6, got 4"
    ):
        global_norm.finish(dev, stats.rows(0, 4), scalars)
    with pytest.raises(
        ValueError, match="global_norm_combine: statistics must be at most 63, got 64"
    ):
        many = dev.alloc("many", (64,), F64, "Gradients")
        global_norm.combine(dev, many, dev.alloc("gathered", (2, 64), F64, "Gradients"))
