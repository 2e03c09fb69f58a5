"""Attention's sinks on a device against their reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Accumulator
from llmq.ops.attention import attention_gate
from llmq.ref.attention.attention_gate import SINKS_CASES as CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run, step_scalars

SMALL = {name: shape for name, shape in CASES.items() if name != "gpt_oss"}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_equals_reference(dev, rng, name, dtype):
    B, T, Hq, Hd = SMALL[name]
    out, d_out = rng.normal(size=(2, B, T, Hq, Hd)).astype(dtype.numpy)
    without = rng.normal(size=(B, Hq, T)).astype(np.float32)
    sinks = rng.normal(size=Hq).astype(dtype.numpy)
    without[0, 0, 0] = 500  # far from a sink, on both sides
    sinks[-1] = 30
    arrays = {"out": out, "lse": np.empty_like(without), "without": without, "sinks": sinks}
    got, want = (run(d, attention_gate.sinks_forward, arrays) for d in (dev, host_device()))
    # exp and log of two libraries; BF16 rounds now and then to the other neighbour.
    rtol = 2**-7 if dtype == BF16 else 2e-6
    np.testing.assert_allclose(got["lse"], want["lse"], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(
        got["out"].astype(np.float32), want["out"].astype(np.float32), rtol=rtol, atol=1e-7
    )
    back = {"d": np.ones(Hq, np.float32), "d_out": d_out, "out": want["out"], "lse": want["lse"]}
    back |= {"sinks": sinks, "scalars": step_scalars(seed=1)}

    def call(dev, d, scalars, **tensors):
        attention_gate.sinks_backward(dev, Accumulator(d, True, scalars, salt=1), **tensors)

    got, want = (run(d, call, back)["d"] for d in (dev, host_device()))
    # Sums in another order.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_wrong_arguments():
    plan = PlanDevice(GPU_SPEC)

    def make(shape, dtype):
        return plan.alloc("t", shape, dtype, "Activations")

    lse, sinks = make((1, 2, 4), F32), make((2,), BF16)
    with pytest.raises(ValueError, match=r"forward: Hd must be a multiple of 8 on a GPU"):
        attention_gate.sinks_forward(plan, make((1, 4, 2, 12), BF16), lse, lse, sinks)
