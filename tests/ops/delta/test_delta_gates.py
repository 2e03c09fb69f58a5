"""Decays and betas on a device against their reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Accumulator
from llmq.ops.delta import delta_gates
from llmq.ref.delta.delta_gates import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, close, step_scalars

SMALL = {name: shape for name, shape in CASES.items() if "qwen" not in name}


# exp and log1p of two libraries; sums of 256 rows; BF16 rounds to a neighbour.
check = partial(close, bf16=2**-7, f32=2e-5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_equals_reference(dev, rng, name, dtype):
    rows, heads, columns, offset = SMALL[name]
    arrays = {
        "gates": np.full((rows, 2, heads), np.nan, np.float32),
        "x": rng.normal(size=(rows, columns)).astype(dtype.numpy),
        "a_log": rng.normal(size=heads).astype(dtype.numpy),
        "dt_bias": rng.normal(size=heads).astype(dtype.numpy),
    }

    def forward(dev, **t):
        delta_gates.forward(dev, **t, offset=offset)

    def backward(dev, d_a_log, d_dt_bias, scalars, **t):
        targets = [Accumulator(d, True, scalars, i) for i, d in enumerate((d_a_log, d_dt_bias))]
        delta_gates.backward(dev, t.pop("d_x"), *targets, **t, offset=offset)

    arrays["gates"] = check(dev, forward, arrays, ("gates",))["gates"]
    arrays |= {
        "d_gates": rng.normal(size=(rows, 2, heads)).astype(np.float32),
        "d_x": np.full((rows, columns), 7, dtype.numpy),
        "d_a_log": rng.normal(size=heads).astype(np.float32),
        "d_dt_bias": rng.normal(size=heads).astype(np.float32),
        "scalars": step_scalars(),
    }
    got = check(dev, backward, arrays, ("d_x", "d_a_log", "d_dt_bias"))
    others = np.delete(got["d_x"], range(offset, offset + 2 * heads), axis=1)
    assert (others == 7).all()


WRONG = [
    ({"gates": ((3, 2, 4), BF16)}, TypeError, "gates must be F32"),
    ({"gates": ((3, 4), F32)}, ValueError, "gates must have 24 elements"),
    ({"x": ((3, 9), BF16)}, ValueError, "x has no 8 columns from 2 on"),
    ({"dt_bias": ((5,), BF16)}, ValueError, "dt_bias must have shape"),
]


@pytest.mark.parametrize("change, error, text", WRONG)
def test_wrong_arguments_raise(change, error, text):
    specs = {"gates": ((3, 2, 4), F32), "x": ((3, 10), BF16)}
    specs |= {"a_log": ((4,), BF16), "dt_bias": ((4,), BF16)} | change
    plan = PlanDevice(GPU_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"delta_gates.forward: {text}"):
        delta_gates.forward(plan, **tensors, offset=2)
