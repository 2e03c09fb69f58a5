"""Adding to a gradient on a device against the reference: the same bits."""

import numpy as np
import pytest

from llmq.dtypes import BF16, F32, I32
from llmq.ops import reduce
from llmq.ref.reduce import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.tensor import Accumulator
from tests.harness import host_device, run, step_scalars

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("target, source", [(F32, F32), (BF16, F32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_equals_reference(dev, rng, shape, target, source, accumulate):
    start = rng.normal(size=shape) if accumulate else np.full(shape, np.nan)
    arrays = {
        "d_sum": start.astype(target.numpy),
        "x": rng.normal(size=shape).astype(source.numpy),
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
    }

    def call(dev, d_sum, x, scalars):
        reduce.add(dev, Accumulator(d_sum, accumulate, scalars, salt=4), x)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_array_equal(got["d_sum"], want["d_sum"])


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(name, shape, dtype):
        return dev.alloc(name, shape, dtype, "Gradients")

    x, scalars = make("x", (4,), F32), make("scalars", (16,), I32)
    with pytest.raises(TypeError, match=r"reduce: acc\.tensor must be F32 or BF16, got I32"):
        reduce.add(dev, Accumulator(make("d", (4,), I32), True, scalars, 0), x)
    with pytest.raises(ValueError, match=r"reduce: acc\.tensor must have shape"):
        reduce.add(dev, Accumulator(make("d", (5,), F32), True, scalars, 0), x)
    with pytest.raises(TypeError, match=r"reduce: acc\.scalars must be I32"):
        reduce.add(dev, Accumulator(make("d", (4,), F32), True, make("s", (16,), F32), 0), x)
