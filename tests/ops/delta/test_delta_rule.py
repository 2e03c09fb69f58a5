"""The gated delta rule on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.delta import delta_rule
from llmq.ops.delta.delta_rule import Heads
from llmq.ref.delta.delta_rule import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run

SMALL = {name: shape for name, shape in CASES.items() if "qwen" not in name}


def state_like(rng, shape) -> np.ndarray:
    """About as large as such texts leave it."""
    return (rng.normal(size=shape) / 4).astype(np.float32)


def arrays_of(rng, shape, dtype, *, documents: bool = False, carried: bool = False) -> dict:
    B, T, *heads = shape
    heads = Heads(*heads)
    gates = np.stack([-rng.exponential(size=(B, T, heads.Hv)), rng.uniform(size=(B, T, heads.Hv))])
    arrays = {
        "out": np.full((B, T, heads.Hv * heads.DV), np.nan, dtype.numpy),
        "qkv": rng.normal(size=(B, T, heads.channels)).astype(dtype.numpy),
        "gates": (gates * np.array([0.2, 1]).reshape(2, 1, 1, 1)).astype(np.float32),
        "starts": None,
        "state": None,
    }
    arrays["gates"] = np.ascontiguousarray(np.moveaxis(arrays["gates"], 0, 2))
    if carried:
        arrays["state"] = state_like(rng, (B, heads.Hv, heads.DK, heads.DV))
    if documents:  # of 1 token, of less than a chunk, of several
        begins = [t for t in (0, 1, 3, 40, 64, T - 2) if t < T]
        starts = [max(b for b in begins if b <= t) for t in range(T)]
        arrays["starts"] = np.array([starts] * B, np.int32)
    return arrays


def backward_arrays(rng, shape, dtype, **kind: bool) -> dict:
    arrays = arrays_of(rng, shape, dtype, **kind)
    d_out = rng.normal(size=arrays.pop("out").shape).astype(dtype.numpy)
    state = arrays["state"]
    return arrays | {
        "d_out": d_out,
        "d_qkv": np.full(arrays["qkv"].shape, np.nan, dtype.numpy),
        "d_gates": np.full(arrays["gates"].shape, np.nan, np.float32),
        "d_state": None if state is None else state_like(rng, state.shape),
    }


def assert_close(got: dict, want: dict, names: tuple[str, ...], dtype) -> None:
    """F32: sums in another order. BF16, against F32: states, changes and squares are rounded to 8
    bits where they are multiplied, one after the other."""
    for name in names:
        a, b = (x[name].astype(np.float32) for x in (got, want))
        if dtype is F32:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max(), err_msg=name)
        else:
            assert np.linalg.norm(a - b) <= 2**-6 * np.linalg.norm(b), name


def both(dev, call, arrays) -> tuple[dict, dict]:
    """Results of the device, and of the reference in F32."""
    wide = {
        name: x.astype(np.float32) if x is not None and x.dtype == BF16.numpy else x
        for name, x in arrays.items()
    }
    return run(dev, call, arrays), run(host_device(), call, wide)


EQUAL = [  # each kind in each type, for whole chunks and others
    *(("one_token", F32, kind) for kind in ("plain", "documents", "carried")),
    *(("ragged", F32, kind) for kind in ("documents", "carried")),
    *(("three_chunks", F32, kind) for kind in ("plain", "carried")),
    *(("ragged", BF16, kind) for kind in ("plain", "documents", "carried")),
    *(("whole_chunks", BF16, kind) for kind in ("plain", "carried")),
]


@pytest.mark.parametrize("name, dtype, kind", EQUAL, ids=str)
def test_equals_reference(dev, rng, name, dtype, kind):
    shape = SMALL[name]
    heads, how = Heads(*shape[2:]), {"documents": kind == "documents", "carried": kind == "carried"}
    arrays = arrays_of(rng, shape, dtype, **how)
    got, want = both(dev, lambda dev, **t: delta_rule.forward(dev, **t, heads=heads), arrays)
    names = ("out", "state") if kind == "carried" else ("out",)
    assert_close(got, want, names, dtype)
    arrays = backward_arrays(rng, shape, dtype, **how)
    got, want = both(dev, lambda dev, **t: delta_rule.backward(dev, **t, heads=heads), arrays)
    names = ("d_qkv", "d_gates", *(("state", "d_state") if kind == "carried" else ()))
    assert_close(got, want, names, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_head_of_128(dev, rng, dtype):
    shape = SMALL["head_128"]
    heads, arrays = Heads(*shape[2:]), arrays_of(rng, shape, dtype)
    got, want = both(dev, lambda dev, **t: delta_rule.forward(dev, **t, heads=heads), arrays)
    assert_close(got, want, ("out",), dtype)
    arrays = backward_arrays(rng, shape, dtype)
    got, want = both(dev, lambda dev, **t: delta_rule.backward(dev, **t, heads=heads), arrays)
    assert_close(got, want, ("d_qkv", "d_gates"), dtype)


def test_recurrence_equals_reference_and_chunks(dev, rng):
    shape = (2, 5, 1, 2, 64, 32)
    heads, arrays = Heads(*shape[2:]), arrays_of(rng, shape, F32, carried=True)
    chunks = run(dev, lambda dev, **t: delta_rule.forward(dev, **t, heads=heads), arrays)
    del arrays["starts"]
    got, want = both(dev, lambda dev, **t: delta_rule.recurrence(dev, **t, heads=heads), arrays)
    for other in (want, chunks):
        assert_close(got, other, ("out", "state"), F32)


def test_no_bit_depends_on_other_documents(dev, rng):
    """Nor does any depend on a second run."""
    shape = (1, 70, 1, 1, 32, 32)
    heads, arrays = Heads(*shape[2:]), backward_arrays(rng, shape, F32)
    arrays["starts"] = np.where(np.arange(70) < 20, 0, np.where(np.arange(70) < 67, 20, 67))[None]
    arrays["starts"] = arrays["starts"].astype(np.int32)
    results = []
    for factor in (1, 1, 4):
        changed = {name: arrays[name].copy() for name in ("qkv", "gates", "d_out")}
        for array in changed.values():
            array[:, :20] *= factor
            array[:, 67:] *= factor
        call = arrays | changed
        results.append(run(dev, lambda dev, **t: delta_rule.backward(dev, **t, heads=heads), call))
    for name in ("d_qkv", "d_gates"):
        first, again, other = (result[name] for result in results)
        np.testing.assert_array_equal(first, again)
        np.testing.assert_array_equal(first[:, 20:67], other[:, 20:67])
        assert (first[:, :20] != other[:, :20]).any()


WRONG = [
    ({"gates": ((1, 4, 2, 2), BF16)}, TypeError, "gates must be F32"),
    ({"gates": ((1, 4, 2, 1), F32)}, ValueError, "gates must have shape"),
    ({"qkv": ((1, 4, 128), BF16)}, ValueError, r"qkv must have shape \(B, T, 256\)"),
    ({"starts": ((1, 4), I32)}, ValueError, "a state belongs to one document"),
    ({"out": ((1, 4, 64), BF16)}, ValueError, "out must have shape"),
]


@pytest.mark.parametrize("change, error, text", WRONG)
def test_wrong_arguments_raise(change, error, text):
    specs = {"out": ((1, 4, 128), BF16), "qkv": ((1, 4, 256), BF16), "gates": ((1, 4, 2, 2), F32)}
    specs |= {"state": ((1, 2, 64, 64), F32)} | change
    plan = PlanDevice(GPU_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"delta_rule.forward: {text}"):
        delta_rule.forward(plan, **tensors, heads=Heads(1, 2, 64, 64))


def test_heads_that_no_kernel_has_are_refused_on_a_gpu():
    plan = PlanDevice(GPU_SPEC)
    qkv = plan.alloc("qkv", (1, 4, 48), F32, "Activations")
    gates = plan.alloc("gates", (1, 4, 2, 1), F32, "Activations")
    with pytest.raises(ValueError, match="DK and DV must be multiples of 32 up to 128 on a GPU"):
        delta_rule.forward(plan, qkv, qkv, gates, Heads(1, 1, 16, 16))
