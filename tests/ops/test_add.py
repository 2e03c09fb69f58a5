"""The sum of two tensors on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.add import add
from llmq.ref.add import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("olmo")}


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_equals_reference(dev, rng, shape, dtype):
    a, b = (rng.normal(size=shape).astype(dtype.numpy) for _ in range(2))
    arrays = {"out": np.full(shape, np.nan, dtype.numpy), "a": a, "b": b}
    got, want = run(dev, add, arrays), run(host_device(), add, arrays)
    np.testing.assert_array_equal(got["out"], want["out"])
    in_place = run(dev, lambda dev, a, b: add(dev, a, a, b), {"a": a, "b": b})
    np.testing.assert_array_equal(in_place["a"], want["out"])


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)
    x = dev.alloc("x", (4,), F32, "Weights")
    with pytest.raises(TypeError, match="add: a must be F32 or BF16, got I32"):
        add(dev, x, dev.alloc("a", (4,), I32, "Weights"), x)
    with pytest.raises(TypeError, match="add: b must be F32, got BF16"):
        add(dev, x, x, dev.alloc("b", (4,), BF16, "Weights"))
    with pytest.raises(ValueError, match="add: out must have shape"):
        add(dev, dev.alloc("out", (5,), F32, "Weights"), x, x)
