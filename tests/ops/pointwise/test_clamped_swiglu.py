"""The gated activation of pairs on a device against its reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.pointwise import swiglu
from llmq.ref.pointwise.swiglu import CLAMPED_CASES as CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run

SMALL = {name: shape for name, shape in CASES.items() if name != "gpt_oss_20b"}
HOW = {"alpha": 1.702, "limit": 2.0}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows, F", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, rows, F, dtype):
    pairs = (rng.normal(size=(rows, 2 * F)) * 3).astype(dtype.numpy)
    d_out = rng.normal(size=(rows, F)).astype(dtype.numpy)
    pairs[0, :4] = [np.nan, 1, 1, np.nan]  # which is not cut off
    forward = {"out": np.empty_like(d_out), "pairs": pairs}
    backward = {"d_pairs": np.empty_like(pairs), "d_out": d_out, "pairs": pairs}
    calls = [(swiglu.clamped_forward, forward), (swiglu.clamped_backward, backward)]
    for call, arrays in calls:
        got, want = (run(d, partial(call, **HOW), arrays) for d in (dev, host_device()))
        (name,) = arrays.keys() & {"out", "d_pairs"}
        # exp of two libraries; BF16 rounds now and then to the other neighbour.
        np.testing.assert_allclose(
            got[name].astype(np.float32),
            want[name].astype(np.float32),
            rtol=2**-7 if dtype == BF16 else 2e-6,
            atol=1e-6,
        )
        assert np.isnan(got[name][0, :2].astype(np.float32)).any()


def test_wrong_arguments():
    plan = PlanDevice(GPU_SPEC)
    pairs = plan.alloc("t", (4, 30), BF16, "Activations")
    with pytest.raises(ValueError, match="backward: F must be a multiple of 8 on a GPU"):
        half = pairs.view(8, 15).rows(0, 4)
        swiglu.clamped_backward(plan, pairs, half, pairs, **HOW)
