"""AdamW on a device against its reference: the same bits."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, I32, I64
from llmq.ops.update import adamw
from llmq.ref.update.adamw import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run, step_scalars

HYPER = {
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
    "salt": 11,
    "lr_scale": 0.5,
}
SMALL = {name: ends for name, ends in CASES.items() if not name.startswith("qwen")}
MANY = tuple(range(128, 20 * 128 + 1, 128))  # several parameters to a thread block
SCALARS = {"lr": 1e-2, "beta1_correction": 2, "beta2_correction": 3, "grad_scale": 0.5, "seed": 5}

update = partial(adamw.update, **HYPER)


def inputs(rng, ends, p=F32, g=F32, m=F32, v=F32, work=True, **scalars) -> dict:
    n = ends[-1]
    segments = np.array([[end, i % 2] for i, end in enumerate(ends, 1)], np.int64)
    arrays = {
        "param": rng.normal(size=n).astype(p.numpy),
        "work": np.full(n, np.nan, BF16.numpy) if work else None,
        "grad": rng.normal(size=n).astype(g.numpy),
        "m": rng.normal(size=n).astype(m.numpy),
        "v": np.square(rng.normal(size=n)).astype(v.numpy),
        "segments": segments,
        "scalars": step_scalars(**{**SCALARS, **scalars}),
    }
    # Any code that is not NaN, of v none that is negative; scales of all sizes.
    for name, dtype, codes in (("m", m, 255), ("v", v, 127)):
        arrays[f"{name}_scale"] = None
        if dtype == E4M3:
            values = rng.integers(0, codes, n).astype(np.uint8)
            arrays[name] = np.where(values == 127, 0, values).astype(np.uint8).view(E4M3.numpy)
            arrays[f"{name}_scale"] = np.ldexp(1, rng.integers(-60, 9, n // 128)).astype(np.float32)
    return arrays


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


@pytest.mark.parametrize("moments", [(BF16, BF16), (E4M3, E4M3)], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("first, n", [(0, 256), (128, 2048), (2176, 2944)])
def test_a_part_gets_the_bits_of_the_whole(dev, rng, first, n, moments):
    arrays = inputs(rng, CASES["ragged_grid"], BF16, BF16, *moments)
    whole = run(dev, update, arrays)
    in_slab = ("param", "work", "grad", "m", "v")
    part = {k: v[first : first + n] if k in in_slab else v for k, v in arrays.items()}
    for name in ("m_scale", "v_scale"):
        if arrays[name] is not None:
            part[name] = arrays[name][first // 128 : (first + n) // 128]
    for device in (dev, host_device()):
        got = run(device, partial(update, first=first), part)
        for name in in_slab:
            np.testing.assert_array_equal(got[name], whole[name][first : first + n], err_msg=name)
        for name in ("m_scale", "v_scale"):
            if part[name] is not None:
                want = whole[name][first // 128 : (first + n) // 128]
                np.testing.assert_array_equal(got[name], want, err_msg=name)


def test_parts_far_into_a_slab(dev, rng):
    # Past 2^32 elements, in the second of three parameters, which does not decay.
    arrays = inputs(rng, (256, 384), BF16, F32, BF16, BF16, work=False)
    first = 3 << 32
    arrays["segments"] = np.array([[256, 1], [first + 200 * 128, 0], [first << 1, 1]], np.int64)
    call = partial(update, first=first)
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    low = run(dev, call, {**arrays, "segments": np.array([[first << 1, 0]], np.int64)})
    for name in ("param", "m", "v"):
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        np.testing.assert_array_equal(got[name], low[name], err_msg=name)
    assert (got["param"] != run(dev, update, arrays)["param"]).any()


EIGHT_BITS = [(BF16, BF16, E4M3, E4M3), (F32, F32, E4M3, F32), (F32, BF16, BF16, E4M3)]


@pytest.mark.parametrize("dtypes", EIGHT_BITS, ids=["both", "m", "v"])
@pytest.mark.parametrize("ends", [CASES["three"], CASES["ragged_grid"]], ids=["three", "ragged"])
def test_eight_bit_moments(dev, rng, ends, dtypes):
    arrays = inputs(rng, ends, *dtypes, work=dtypes[0] == F32)
    got = assert_same(dev, arrays)
    for name, dtype in (("m", dtypes[2]), ("v", dtypes[3])):
        if dtype == E4M3:
            numbers = got[name].astype(np.float32).reshape(-1, 128)
            largest = np.abs(numbers).max(axis=1)
            assert ((largest > 208) & (largest <= 448)).all()  # 224, or one code below by rounding
            scale = got[f"{name}_scale"]
            np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)  # powers of two
            assert (scale != arrays[f"{name}_scale"]).any()


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20, 1e15])
def test_eight_bit_moments_of_any_size(dev, rng, size):
    arrays = inputs(rng, CASES["three"], BF16, F32, E4M3, E4M3, work=False, grad_scale=1)
    arrays["grad"] *= np.float32(size)
    arrays["grad"][:256:2] *= np.float32(1e-3)
    arrays["grad"][128:256] = 0
    for name in ("m", "v", "m_scale", "v_scale"):
        arrays[name] = np.zeros_like(arrays[name])
    got = assert_same(dev, arrays)
    assert np.isfinite(got["param"].astype(np.float32)).all()
    assert (got["v"].view(np.uint8) > 0).all()
    assert (got["m"].astype(np.float32)[256:] != 0).any() == (size > 0)


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


def test_wrong_scales(plan_tensors):
    dev, make = plan_tensors
    good = {n: make(n) for n in NAMES} | {"m": make("m", dtype=E4M3)}
    update(dev, **good, m_scale=make("m_scale", (2,)))
    with pytest.raises(TypeError, match="adamw: m_scale must be given, m is F8_E4M3"):
        update(dev, **good)
    with pytest.raises(TypeError, match="adamw: v_scale must be None, v is F32"):
        update(dev, **good, m_scale=make("m_scale", (2,)), v_scale=make("v_scale", (2,)))


def test_ragged_slab(plan_tensors):
    dev, make = plan_tensors
    slab = {n: make(n, (200,)) for n in ("param", "work", "grad", "m", "v")}
    with pytest.raises(ValueError, match="adamw: n must be a multiple of 128, got 200"):
        update(dev, **slab, segments=make("segments"), scalars=make("scalars"))


def test_ragged_first(plan_tensors):
    dev, make = plan_tensors
    for first in (64, -128):
        with pytest.raises(ValueError, match="adamw: first must be "):
            update(dev, **{n: make(n) for n in NAMES}, first=first)


def test_traffic(plan_tensors):
    dev, make = plan_tensors
    update(dev, **{n: make(n) for n in NAMES})
    # param, m and v read and written, grad read, work written; segments and scalars are small.
    assert dev.bytes["adamw"] == 256 * (6 * 4 + 4 + 2) + 16 + 64
