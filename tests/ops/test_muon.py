"""Muon's kernels on a device against their references: the same bits."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, F64, I32
from llmq.ops import global_norm, muon
from llmq.ref.muon import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run, step_scalars

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}
SCALARS = {"lr": 1e-2, "grad_scale": 0.5, "seed": 5, "step": 3}
propose = partial(muon.propose, momentum=0.95, salt=7)
apply = partial(muon.apply, lr_scale=0.5, weight_decay=0.1, cautious=False, salt=7)


def proposal(rng, n, g=F32, m=F32, **scalars) -> dict:
    arrays = {
        "change": np.full(n, np.nan, BF16.numpy),
        "grad": rng.normal(size=n).astype(g.numpy),
        "m": rng.normal(size=n).astype(m.numpy),
        "scalars": step_scalars(**SCALARS | scalars),
        "m_scale": None,
    }
    if m == E4M3:
        arrays["m_scale"] = np.ldexp(1, rng.integers(-60, 9, n // 128)).astype(np.float32)
    return arrays


def application(rng, n, p=F32, work=True, **scalars) -> dict:
    return {
        "param": rng.normal(size=n).astype(p.numpy),
        "work": np.full(n, np.nan, BF16.numpy) if work else None,
        "change": rng.normal(size=n).astype(BF16.numpy),
        "scalars": step_scalars(**SCALARS | scalars),
    }


def assert_same(dev, call, arrays) -> dict:
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    return got


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("g, m", [(F32, F32), (BF16, BF16), (BF16, E4M3)], ids=str)
def test_propose(dev, rng, case, g, m):
    arrays = proposal(rng, np.prod(SMALL[case]), g, m)
    whole = assert_same(dev, propose, arrays)
    part = {k: v if k in ("scalars", "m_scale") else v[128:] for k, v in arrays.items()}
    if m == E4M3:
        part["m_scale"] = arrays["m_scale"][1:]
    if part["m"].size:
        got = run(dev, partial(propose, first=128), part)
        for name in ("change", "m"):
            np.testing.assert_array_equal(got[name], whole[name][128:], err_msg=name)


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("p, work", [(F32, True), (F32, False), (BF16, False)], ids=str)
@pytest.mark.parametrize("cautious", [False, True])
def test_apply(dev, rng, case, p, work, cautious):
    arrays = application(rng, np.prod(SMALL[case]), p, work)
    call = partial(apply, cautious=cautious)
    whole = assert_same(dev, call, arrays)
    assert (whole["param"] != arrays["param"]).any()
    part = {k: v if k == "scalars" or v is None else v[128:] for k, v in arrays.items()}
    if part["param"].size:
        got = run(dev, partial(call, first=128), part)
        np.testing.assert_array_equal(got["param"], whole["param"][128:])


@pytest.mark.parametrize("size", [0.0, 1e-12, 1.0, 1e6])
@pytest.mark.parametrize("case", [*SMALL.values(), (3, 7)], ids=[*SMALL, "ragged"])
def test_normalize(dev, rng, case, size):
    x = (size * rng.normal(size=case)).astype(BF16.numpy)

    def call(dev, x):
        with dev.scratch("sums", (global_norm.num_partials(dev, x),), F64) as sums:
            global_norm.partials(dev, sums, x)
            muon.normalize(dev, x, sums, margin=1.02)

    got = assert_same(dev, call, {"x": x})["x"].astype(np.float64)
    norm = np.linalg.norm(x.astype(np.float64))
    want = x.astype(np.float64) / (max(norm, 1e-7) * 1.02)
    # BF16 has 8 significant bits, of the norm and of the result.
    np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=1e-9)


def test_a_step_that_is_skipped(dev, rng):
    arrays = proposal(rng, 384, BF16, BF16, skip_update=1)
    got = assert_same(dev, propose, arrays)
    assert not got["change"].astype(np.float32).any()
    np.testing.assert_array_equal(got["m"], arrays["m"])
    arrays = application(rng, 384, work=False, skip_update=1)
    got = assert_same(dev, apply, arrays)
    np.testing.assert_array_equal(got["param"], arrays["param"])


def test_checks_and_traffic():
    dev = PlanDevice(HOST_SPEC)

    def make(name, dtype=F32, n=256):
        return dev.alloc(name, (n,), dtype, "Master")

    change, scalars = make("change", BF16), make("scalars", I32, 16)
    grad, m, param, work = make("grad"), make("m"), make("param"), make("work", BF16)
    propose(dev, change, grad, m, scalars)
    apply(dev, param, work, change, scalars)
    muon.normalize(dev, change, make("partials", F64, 2))
    # A propose reads grad, reads and writes m, writes change; normalize changes x.
    assert dev.bytes["muon_propose"] == 256 * (4 + 8 + 2) + 64
    assert dev.bytes["muon_apply"] == 256 * (8 + 2 + 2) + 64
    assert dev.bytes["muon_normalize"] == 256 * 4 + 16
    for name, call in {
        "change": lambda: propose(dev, make("change"), grad, m, scalars),
        "grad": lambda: propose(dev, change, make("grad", I32), m, scalars),
        "m": lambda: propose(dev, change, grad, make("m", I32), scalars),
        "m_scale": lambda: propose(dev, change, grad, m, scalars, m_scale=make("scale")),
        "param": lambda: apply(dev, make("param", E4M3), None, change, scalars),
        "work": lambda: apply(dev, param, make("work"), change, scalars),
        "partials": lambda: muon.normalize(dev, change, make("partials")),
    }.items():
        with pytest.raises(TypeError, match=f"muon: {name} must be"):
            call()
    for name, call in {
        "change.size": lambda: propose(dev, make("change", BF16, 64), grad, m, scalars),
        "first": lambda: propose(dev, change, grad, m, scalars, first=64),
        "grad": lambda: propose(dev, change, make("grad", F32, 128), m, scalars),
    }.items():
        with pytest.raises(ValueError, match=f"muon: {name} must"):
            call()
