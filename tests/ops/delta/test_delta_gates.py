"""Decays and betas on a device against their reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Accumulator
from llmq.ops.delta import delta_gates
from llmq.ref.delta.delta_gates import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, close, run, step_scalars

SMALL = {name: shape for name, shape in CASES.items() if shape[0] < 1000}


# exp and log1p of two libraries; sums of 256 rows; BF16 rounds to a neighbour.
check = partial(close, bf16=2**-7, f32=2e-5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_equals_reference(dev, rng, name, dtype):
    rows, heads, columns, offset, parts = SMALL[name]
    how = {"offset": offset, "parts": parts, "least": 0.3 if parts == 1 else 0.0}
    arrays = {
        "gates": np.full((rows, 2, heads), np.nan, np.float32),
        "x": rng.normal(size=(rows, columns)).astype(dtype.numpy),
        "a_log": rng.normal(size=heads).astype(dtype.numpy),
        "dt_bias": rng.normal(size=heads).astype(dtype.numpy),
    }

    def forward(dev, **t):
        delta_gates.forward(dev, **t, **how)

    def backward(dev, d_a_log, d_dt_bias, scalars, **t):
        targets = [Accumulator(d, True, scalars, i) for i, d in enumerate((d_a_log, d_dt_bias))]
        delta_gates.backward(dev, t.pop("d_x"), *targets, **t, **how)

    arrays["gates"] = check(dev, forward, arrays, ("gates",))["gates"]
    arrays |= {
        "d_gates": rng.normal(size=(rows, 2, heads)).astype(np.float32),
        "d_x": np.full((rows, columns), 7, dtype.numpy),
        "d_a_log": rng.normal(size=heads).astype(np.float32),
        "d_dt_bias": rng.normal(size=heads).astype(np.float32),
        "scalars": step_scalars(),
    }
    got = check(dev, backward, arrays, ("d_x", "d_a_log", "d_dt_bias"))
    others = np.delete(got["d_x"], range(offset, offset + parts * heads), axis=1)
    assert (others == 7).all()


def at_limits(dtype) -> dict:
    """Columns b and a of 12 rows for 2 heads: sigmoid and softplus from end to end, about the
    threshold from which softplus is the identity, and heads that decay by nothing and at once."""
    b = np.array([-200, -104, -88, -30, -1e-8, 0, 1e-8, 10, 17, 30, 88, 200], np.float32)
    a = np.array([-200, -104, -88, -30, -17, -1e-8, 0, 19.9, 20, 20.1, 30, 200], np.float32)
    x = np.stack([b, -b, a, -a], 1)
    return {
        "gates": np.full((12, 2, 2), np.nan, np.float32),
        "x": x.astype(dtype.numpy),
        "a_log": np.array([-80, 4], dtype.numpy),
        "dt_bias": np.zeros(2, dtype.numpy),
    }


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gates_and_gradients_at_their_limits(dev, dtype):
    """Decays are at most 0, betas between 0 and 1, and all gradients finite: where the one or the
    other does not move any more, 0."""
    arrays = at_limits(dtype)
    forward = partial(delta_gates.forward, offset=0)
    gates = check(dev, forward, arrays, ("gates",))["gates"]
    assert (gates[:, 0] <= 0).all() and ((gates[:, 1] >= 0) & (gates[:, 1] <= 1)).all()
    assert gates[0, 1, 0] == gates[-1, 1, 1] == 0 and gates[-1, 1, 0] == gates[0, 1, 1] == 1
    assert gates[0, 0, 0] == 0 and gates[-1, 0, 1] == 0 and gates[0, 0, 1] < -1e4
    arrays |= {
        "gates": gates,
        "d_gates": np.ones((12, 2, 2), np.float32),
        "d_x": np.full((12, 4), np.nan, dtype.numpy),
    }

    def backward(dev, d_x, **t):
        delta_gates.backward(dev, d_x, None, None, **t, offset=0)

    d_x = check(dev, backward, arrays, ("d_x",))["d_x"].astype(np.float32)
    assert np.isfinite(d_x).all()
    saturated = (gates[:, 1] == 0) | (gates[:, 1] == 1)
    assert saturated.any() and not d_x[:, :2][saturated].any()
    assert (d_x[:, 2:] <= 0).all()  # more of `a` is more decay


@pytest.mark.parametrize("wide", [F32, BF16], ids=str)
def test_gradients_of_heads_are_added_or_written(dev, rng, wide):
    """Sums over all rows, or nothing where nobody wants them."""
    rows, heads = 70, 3
    arrays = {
        "d_gates": rng.normal(size=(rows, 2, heads)).astype(np.float32),
        "gates": -rng.uniform(size=(rows, 2, heads)).astype(np.float32),
        "x": rng.normal(size=(rows, 2 * heads)).astype(np.float32),
        "a_log": rng.normal(size=heads).astype(np.float32),
        "dt_bias": rng.normal(size=heads).astype(np.float32),
        "d_x": np.full((rows, 2 * heads), np.nan, np.float32),
        "d_a_log": np.full(heads, 8, wide.numpy),
        "scalars": step_scalars(),
    }
    found = {}
    for accumulate in (False, True):

        def backward(dev, d_x, d_a_log, scalars, accumulate=accumulate, **t):
            target = Accumulator(d_a_log, accumulate, scalars, 0)
            delta_gates.backward(dev, d_x, target, None, **t, offset=0)

        found[accumulate] = run(dev, backward, arrays)["d_a_log"].astype(np.float64)
    want = (arrays["d_gates"] * arrays["gates"]).astype(np.float64)[:, 0].sum(0)
    # BF16: a rounding of the sum, to a neighbour where it is added (stochastic).
    rounding = 2e-5 if wide is F32 else 2**-7
    np.testing.assert_allclose(found[False], want, rtol=rounding, atol=1e-5)
    np.testing.assert_allclose(found[True], want + 8, rtol=rounding, atol=1e-5)


WRONG = [
    ({"gates": ((3, 2, 4), BF16)}, TypeError, "gates must be F32"),
    ({"gates": ((3, 4), F32)}, ValueError, r"gates must have shape \(\*3, 2, 4\)"),
    ({"x": ((3, 9), BF16)}, ValueError, r"offset \+ parts\*heads must be at most 9, got 10"),
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
