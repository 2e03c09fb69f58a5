"""The short convolution on a device against its reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Accumulator
from llmq.ops.delta import short_conv
from llmq.ref.delta.short_conv import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, close, step_scalars

SMALL = {name: shape for name, shape in CASES.items() if "qwen" not in name}


def arrays_of(rng, shape, dtype, documents: bool) -> dict:
    B, T, channels, columns, taps = shape
    begins = [t for t in (0, 1, 2, 63, 66) if t < T]
    starts = np.array([[max(b for b in begins if b <= t) for t in range(T)]] * B, np.int32)
    return {
        "x": rng.normal(size=(B, T, columns)).astype(dtype.numpy),
        "weight": rng.normal(size=(channels, taps)).astype(dtype.numpy),
        "starts": starts if documents else None,
    }


# A few F32 roundings of sums near 1; BF16 results round now and then to the other side.
check = partial(close, bf16=2**-7, f32=1e-5)


@pytest.mark.parametrize(
    "documents, silu, biased", [(False, True, True), (True, True, False), (True, False, True)]
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_equals_reference(dev, rng, name, dtype, documents, silu, biased):
    shape = SMALL[name]
    B, T, channels, columns, taps = shape
    arrays = arrays_of(rng, shape, dtype, documents)
    arrays["bias"] = rng.normal(size=channels).astype(dtype.numpy) if biased else None
    out = np.full((B, T, channels), np.nan, dtype.numpy)
    check(dev, partial(short_conv.forward, silu=silu), arrays | {"out": out}, ("out",))

    def backward(dev, d_weight, d_bias, scalars, **t):
        targets = [d and Accumulator(d, True, scalars, i) for i, d in ((1, d_weight), (2, d_bias))]
        short_conv.backward(dev, d_weight=targets[0], d_bias=targets[1], **t, silu=silu)

    arrays |= {
        "d_x": np.full((B, T, columns), 7, dtype.numpy),
        "d_weight": rng.normal(size=(channels, taps)).astype(np.float32),
        "d_bias": rng.normal(size=channels).astype(np.float32) if biased else None,
        "d_out": rng.normal(size=out.shape).astype(dtype.numpy),
        "scalars": step_scalars(),
    }
    got = check(dev, backward, arrays, ("d_x", "d_weight", *(("d_bias",) if biased else ())))
    assert (got["d_x"][..., channels:] == 7).all()
    frozen = check(dev, backward, arrays | dict.fromkeys(("d_weight", "d_bias")), ("d_x",))
    np.testing.assert_array_equal(frozen["d_x"], got["d_x"])


def test_a_text_that_goes_on(dev, rng):
    x, weight = (rng.normal(size=s).astype(np.float32) for s in ((1, 9, 8), (6, 4)))
    before = np.zeros((1, 3, 6), np.float32)
    arrays = {"out": np.full((1, 9, 6), np.nan, np.float32), "x": x, "weight": weight}
    whole = check(dev, short_conv.forward, arrays, ("out",))["out"]
    for part in (slice(0, 5), slice(5, 6), slice(6, 9)):
        arrays |= {"x": x[:, part], "out": np.full_like(whole[:, part], np.nan), "before": before}
        got = check(dev, short_conv.forward, arrays, ("out", "before"))
        np.testing.assert_array_equal(got["out"], whole[:, part])
        before = got["before"]


WRONG = [
    ({"out": ((1, 4, 8), F32)}, TypeError, "out must be BF16"),
    ({"x": ((1, 4, 4), BF16)}, ValueError, "channels must be at most 4, got 8"),
    ({"weight": ((8, 1), BF16)}, ValueError, "taps must be at least 2, got 1"),
    ({"x": ((1, 4, 10), BF16)}, ValueError, "columns must be a multiple of 4 on a GPU, got 10"),
    ({"starts": ((1, 5), I32)}, ValueError, "starts must have shape"),
    ({"before": ((1, 2, 8), F32)}, ValueError, "before must have shape"),
]


@pytest.mark.parametrize("change, error, text", WRONG)
def test_wrong_arguments_raise(change, error, text):
    specs = {"out": ((1, 4, 8), BF16), "x": ((1, 4, 12), BF16), "weight": ((8, 4), BF16)} | change
    plan = PlanDevice(GPU_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"short_conv.forward: {text}"):
        short_conv.forward(plan, **tensors)
