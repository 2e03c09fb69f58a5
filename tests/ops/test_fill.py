"""Filling on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops import fill
from llmq.ref.fill import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_every_element_and_no_other(dev, shape, dtype):
    # Tensors follow each other in memory.
    arrays = {"x": np.full(shape, np.nan, dtype.numpy), "next": np.full(64, 5, np.float32)}

    def call(dev, x, next):
        fill.constant(dev, x, -0.1)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_array_equal(got["x"], want["x"])
    np.testing.assert_array_equal(got["next"], 5)


def test_wrong_dtype():
    dev = PlanDevice(HOST_SPEC)
    with pytest.raises(TypeError, match="fill: x must be F32 or BF16, got I32"):
        fill.constant(dev, dev.alloc("x", (4,), I32, "Weights"), 1)
