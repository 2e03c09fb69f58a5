"""Conversion on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.convert import convert
from llmq.ref.convert import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("source, target", [(F32, BF16), (BF16, F32)], ids=str)
def test_equals_reference(dev, rng, shape, source, target):
    arrays = {
        "out": np.full(shape, np.nan, target.numpy),
        "x": (rng.normal(size=shape) * 10.0 ** rng.integers(-38, 38, shape)).astype(source.numpy),
    }
    got, want = run(dev, convert, arrays), run(host_device(), convert, arrays)
    np.testing.assert_array_equal(got["out"], want["out"])


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)
    x = dev.alloc("x", (4,), F32, "Weights")
    with pytest.raises(TypeError, match="convert: out must be F32 or BF16, got I32"):
        convert(dev, dev.alloc("out", (4,), I32, "Weights"), x)
    with pytest.raises(ValueError, match="convert: out must have shape"):
        convert(dev, dev.alloc("out", (5,), BF16, "Weights"), x)
