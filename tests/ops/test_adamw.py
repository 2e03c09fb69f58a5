"""AdamW on a device against its reference: the same bits."""

from functools import partial

import numpy as np
import pytest

from llmq.dtypes import BF16, F32, I32, I64
from llmq.ops import adamw
from llmq.ref.adamw import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run, step_scalars

HYPER = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "salt": 11}
SMALL = {name: ends for name, ends in CASES.items() if not name.startswith("qwen")}
MANY = tuple(range(128, 20 * 128 + 1, 128))  # several parameters to a thread block
SCALARS = {"lr": 1e-2, "beta1_correction": 2, "beta2_correction": 3, "grad_scale": 0.5, "seed": 5}

update = partial(adamw.update, **HYPER)


def inputs(rng, ends, p=F32, g=F32, m=F32, v=F32, work=True, **scalars) -> dict:
    n = ends[-1]
    segments = np.array([[end, i % 2] for i, end in enumerate(ends, 1)], np.int64)
    return {
        "param": rng.normal(size=n).astype(p.numpy),
        "work": np.full(n, np.nan, BF16.numpy) if work else None,
        "grad": rng.normal(size=n).astype(g.numpy),
        "m": rng.normal(size=n).astype(m.numpy),
        "v": np.square(rng.normal(size=n)).astype(v.numpy),
        "segments": segments,
        "scalars": step_scalars(**{**SCALARS, **scalars}),
    }


def assert_same(dev, arrays):
    got, want = run(dev, update, arrays), run(host_device(), update, arrays)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    return got


@pytest.mark.parametrize("ends", [*SMALL.values(), MANY], ids=[*SMALL, "many"])
def test_f32(dev, rng, ends):
    arrays = inputs(rng, ends)
    got = assert_same(dev, arrays)
    assert (got["param"] != arrays["param"]).all()
    np.testing.assert_array_equal(got["work"], got["param"].astype(BF16.numpy))


@pytest.mark.parametrize(
    "dtypes",
    [(BF16, BF16, BF16, BF16), (F32, BF16, BF16, BF16), (BF16, BF16, F32, F32)],
    ids=["all", "f32_param", "f32_moments"],
)
def test_bf16(dev, rng, dtypes):
    arrays = inputs(rng, CASES["ragged_grid"], *dtypes, work=dtypes[0] == F32)
    got = assert_same(dev, arrays)
    later = run(dev, update, {**arrays, "scalars": step_scalars(**SCALARS, step=1)})
    for name, dtype in zip(("param", "m", "v"), (dtypes[0], *dtypes[2:]), strict=True):
        # Only stochastic rounding depends on the step here.
        assert (later[name] == got[name]).all() == (dtype == F32), name


def test_skip_update(dev, rng):
    arrays = inputs(rng, CASES["three"], F32, BF16, BF16, BF16, skip_update=1)
    arrays["work"][:] = 3
    got = run(dev, update, arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.fixture
def plan_tensors():
    dev = PlanDevice(HOST_SPEC)
    shapes = dict.fromkeys(("param", "work", "grad", "m", "v"), (256,))
    dtypes = {"work": BF16, "segments": I64, "scalars": I32}
    return dev, lambda name, shape=None, dtype=None: dev.alloc(
        name,
        shape or {**shapes, "segments": (1, 2), "scalars": (16,)}[name],
        dtype or dtypes.get(name, F32),
        "Master",
    )


NAMES = ("param", "work", "grad", "m", "v", "segments", "scalars")


@pytest.mark.parametrize("name", NAMES)
def test_wrong_dtype_and_shape(plan_tensors, name):
    dev, make = plan_tensors
    good = {n: make(n) for n in NAMES}
    update(dev, **good)
    wrong = I32 if name != "scalars" else F32
    with pytest.raises(TypeError, match=f"adamw: {name} must be"):
        update(dev, **{**good, name: make(name, dtype=wrong)})
    if name != "param":
        with pytest.raises(ValueError, match=f"adamw: {name} must have shape"):
            update(dev, **{**good, name: make(name, (7, 3))})


def test_ragged_slab(plan_tensors):
    dev, make = plan_tensors
    slab = {n: make(n, (200,)) for n in ("param", "work", "grad", "m", "v")}
    with pytest.raises(ValueError, match=r"adamw: param\.size must be a positive multiple of 128"):
        update(dev, **slab, segments=make("segments"), scalars=make("scalars"))


def test_traffic(plan_tensors):
    dev, make = plan_tensors
    update(dev, **{n: make(n) for n in NAMES})
    # param, m and v read and written, grad read, work written; segments and scalars are small.
    assert dev.bytes["adamw"] == 256 * (6 * 4 + 4 + 2) + 16 + 64
