"""Operations on each element, on a device against their references."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.pointwise.elementwise import add, convert, copy_columns, fill, multiply, scale
from llmq.ref.pointwise.elementwise import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sums_equal_the_reference(dev, rng, shape, dtype):
    a, b = (rng.normal(size=shape).astype(dtype.numpy) for _ in range(2))
    arrays = {"out": np.full(shape, np.nan, dtype.numpy), "a": a, "b": b}
    got, want = run(dev, add, arrays), run(host_device(), add, arrays)
    np.testing.assert_array_equal(got["out"], want["out"])
    in_place = run(dev, lambda dev, a, b: add(dev, a, a, b), {"a": a, "b": b})
    np.testing.assert_array_equal(in_place["a"], want["out"])


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_products_equal_the_reference(dev, rng, shape, dtype):
    x, by = (rng.normal(size=s).astype(dtype.numpy) for s in (shape, 1))
    arrays = {"out": np.full(shape, np.nan, dtype.numpy), "x": x, "by": by}
    got, want = run(dev, scale, arrays), run(host_device(), scale, arrays)
    np.testing.assert_array_equal(got["out"], want["out"])
    np.testing.assert_array_equal(want["out"], (x.astype(np.float32) * by).astype(dtype.numpy))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_products_of_columns_equal_the_reference(dev, rng, dtype):
    """Other columns stay, and the result may lie where a factor was."""
    a, b = (rng.normal(size=(19, n)).astype(dtype.numpy) for n in (48, 40))

    def call(dev, out, a, b):
        multiply(dev, out, a, b, 24, (8, 16, 0))
        multiply(dev, a, a, b, 24, (0, 0, 16))

    arrays = {"out": np.ones((19, 40), dtype.numpy), "a": a, "b": b}
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    for name in ("out", "a"):
        np.testing.assert_array_equal(got[name], want[name])
    products = a[:, 16:40].astype(np.float32) * b[:, :24].astype(np.float32)
    np.testing.assert_array_equal(want["out"][:, 8:32], products.astype(dtype.numpy))
    assert (want["out"][:, [*range(8), *range(32, 40)]] == 1).all()
    plan = PlanDevice(HOST_SPEC)
    x = plan.alloc("x", (2, 16), F32, "Weights")
    with pytest.raises(ValueError, match="multiply: "):
        multiply(plan, x, x, x, 8, (0, 0, 16))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("channels", "to", "of"), [(24, 8, 16), (5, 11, 3), (8, 0, 1)])
def test_copies_of_columns_equal_the_reference(dev, rng, dtype, add, channels, to, of):
    """Numbers that are no multiples of 8 are copied element by element."""
    x, out = (rng.normal(size=(19, n)).astype(dtype.numpy) for n in (48, 40))
    call = partial(copy_columns, channels=channels, at=(to, of), add=add)
    arrays = {"out": out, "x": x}
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_array_equal(got["out"], want["out"])
    copied, read = np.s_[to : to + channels], np.s_[of : of + channels]
    sums = x[:, read].astype(np.float32) + (out[:, copied].astype(np.float32) if add else 0)
    np.testing.assert_array_equal(want["out"][:, copied], sums.astype(dtype.numpy))
    np.testing.assert_array_equal(np.delete(want["out"] - out, copied, axis=1), 0)
    plan = PlanDevice(HOST_SPEC)
    x = plan.alloc("x", (2, 16), F32, "Weights")
    with pytest.raises(ValueError, match="copy_columns: "):
        copy_columns(plan, x, x, 8, (0, 16), add=add)


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("source, target", [(F32, BF16), (BF16, F32)], ids=str)
def test_conversions_equal_the_reference(dev, rng, shape, source, target):
    arrays = {
        "out": np.full(shape, np.nan, target.numpy),
        "x": (rng.normal(size=shape) * 10.0 ** rng.integers(-38, 38, shape)).astype(source.numpy),
    }
    got, want = run(dev, convert, arrays), run(host_device(), convert, arrays)
    np.testing.assert_array_equal(got["out"], want["out"])


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_filling_reaches_every_element_and_no_other(dev, shape, dtype):
    # Tensors follow each other in memory.
    arrays = {"x": np.full(shape, np.nan, dtype.numpy), "next": np.full(64, 5, np.float32)}

    def call(dev, x, next):
        fill(dev, x, -0.1)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_array_equal(got["x"], want["x"])
    np.testing.assert_array_equal(got["next"], 5)
