"""The gated norm on a device against its reference."""

import math
from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Accumulator
from llmq.ops.delta import gated_norm
from llmq.ref.delta.gated_norm import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, close, step_scalars

SMALL = {name: shape for name, shape in CASES.items() if shape[0] < 1000}
EPS = 1e-6


# F32 sums of a head in another order; up to three roundings to BF16 may turn.
check = partial(close, bf16=2**-6, f32=2e-5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_equals_reference(dev, rng, name, dtype):
    rows, heads, size, columns, offset, gate_first = SMALL[name]
    how = {"eps": EPS, "offset": offset, "gate_first": gate_first}
    weights = (heads if gate_first else 1, size)
    width = heads * size
    arrays = {
        "out": np.full((rows, width), np.nan, dtype.numpy),
        "x": rng.normal(size=(rows, width)).astype(dtype.numpy),
        "gate": rng.normal(size=(rows, columns)).astype(dtype.numpy),
        "weight": rng.normal(size=weights).astype(dtype.numpy),
    }

    def forward(dev, **t):
        gated_norm.forward(dev, **t, **how)

    def backward(dev, d_weight, scalars, **t):
        target = Accumulator(d_weight, True, scalars, 1)
        gated_norm.backward(dev, d_weight=target, **t, **how)

    check(dev, forward, arrays, ["out"])
    arrays["d_out"] = rng.normal(size=arrays.pop("out").shape).astype(dtype.numpy)
    arrays |= {
        "d_x": np.full((rows, width), np.nan, dtype.numpy),
        "d_gate": np.full((rows, columns), 7, dtype.numpy),
        "d_weight": rng.normal(size=math.prod(weights)).astype(np.float32),
        "scalars": step_scalars(),
    }
    got = check(dev, backward, arrays, ("d_x", "d_gate", "d_weight"))
    assert (np.delete(got["d_gate"], range(offset, offset + width), axis=1) == 7).all()


WRONG = [
    ({"out": ((3, 64), F32)}, TypeError, "out must be BF16"),
    ({"gate": ((3, 80), F32)}, TypeError, "gate must be BF16"),
    (
        {"gate": ((3, 70), BF16)},
        ValueError,
        r"offset \+ heads\*head_dim must be at most 70, got 72",
    ),
    ({"weight": ((1, 48), BF16)}, ValueError, r"x must have shape \(3, 48\), got \(3, 64\)"),
    ({"weight": ((1, 16), BF16)}, ValueError, "head_dim must be a multiple of .* on a GPU"),
    ({"weight": ((3, 32), BF16)}, ValueError, "heads must be a multiple of 3, got 2"),
]


@pytest.mark.parametrize("change, error, text", WRONG)
def test_wrong_arguments_raise(change, error, text):
    specs = {"out": ((3, 64), BF16), "x": ((3, 64), BF16), "gate": ((3, 80), BF16)}
    specs |= {"weight": ((1, 32), BF16)} | change
    plan = PlanDevice(GPU_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"gated_norm.forward: .*{text}"):
        gated_norm.forward(plan, **tensors, eps=EPS, offset=8)
