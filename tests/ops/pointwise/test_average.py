"""The moving average on a device against its reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.pointwise import elementwise
from llmq.ref.pointwise.elementwise import AVERAGE_CASES as CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run, step_scalars

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_equals_reference(dev, rng, case, dtype):
    arrays = {
        "average": rng.normal(size=SMALL[case]).astype(np.float32),
        "param": rng.normal(size=SMALL[case]).astype(dtype.numpy),
    }
    for skipped in (0, 1):
        given = arrays | {"scalars": step_scalars(step=30, skip_update=skipped)}
        update = partial(elementwise.average, decay=0.9)
        got, want = (run(d, update, given)["average"] for d in (dev, host_device()))
        np.testing.assert_array_equal(got, want)
        assert np.array_equal(got, arrays["average"]) == bool(skipped)
    shown = run(dev, partial(elementwise.exchange_average, back=False), arrays)
    for name, array in run(
        host_device(), partial(elementwise.exchange_average, back=False), arrays
    ).items():
        np.testing.assert_array_equal(shown[name].view(np.uint8), array.view(np.uint8))
    back = run(dev, partial(elementwise.exchange_average, back=True), shown)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)
    half = dev.alloc("x", (64,), F32, "Weights")
    with pytest.raises(ValueError, match="n must be a multiple of 128, got 64"):
        elementwise.exchange_average(dev, half, half, back=True)
