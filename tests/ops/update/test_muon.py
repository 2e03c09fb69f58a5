"""Muon's kernels on a device against their references: the same bits."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, I32
from llmq.ops.update import muon
from llmq.ref.update.muon import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run, step_scalars

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}
SCALARS = {"lr": 1e-2, "grad_scale": 0.5, "seed": 5, "step": 3}
propose = partial(muon.propose, momentum=0.95, salt=7)
apply = partial(muon.apply, lr_scale=0.5, weight_decay=0.1, salt=7)


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
def test_apply(dev, rng, case, p, work):
    arrays = application(rng, np.prod(SMALL[case]), p, work)
    whole = assert_same(dev, apply, arrays)
    assert (whole["param"] != arrays["param"]).any()
    part = {k: v if k == "scalars" or v is None else v[128:] for k, v in arrays.items()}
    if part["param"].size:
        got = run(dev, partial(apply, first=128), part)
        np.testing.assert_array_equal(got["param"], whole["param"][128:])


@pytest.mark.parametrize("size", [0.0, 1e-12, 1.0, 1e6])
@pytest.mark.parametrize(
    "case",
    [(2, *SMALL["wide"]), (3, *SMALL["tall"]), (1, 3, 7), (3, 5, 7)],
    ids=["wide", "tall", "ragged", "several_ragged"],
)
def test_normalize(dev, rng, case, size):
    """Each of several matrices has its own norm, and out may be x."""
    x = (size * rng.normal(size=case)).astype(BF16.numpy)
    x[0] *= 2
    got = assert_same(dev, muon.normalize, {"out": np.full_like(x, np.nan), "x": x})["out"]
    same = run(dev, lambda dev, x: muon.normalize(dev, x, x), {"x": x})["x"]
    np.testing.assert_array_equal(same, got)
    for made, matrix in zip(got.astype(np.float64), x.astype(np.float64), strict=True):
        # BF16 has 8 significant bits, of the norm and of the result.
        want = matrix / max(np.linalg.norm(matrix), 1e-7)
        np.testing.assert_allclose(made, want, rtol=2.0**-7, atol=1e-9)


def test_even(dev, rng):
    """A row of zeros stays one, also in the first step; of a matrix of zeros nothing changes."""
    x = rng.normal(size=(3, 300, 48)).astype(BF16.numpy)
    x[0, 1], x[0, 2], x[2] = 0, x[0, 2] * 1e-3, 0
    v = rng.random(size=(3, 300)).astype(np.float32)
    v[0] = 0
    call = partial(muon.even, decay=0.9)
    got, want = (run(d, call, {"x": x, "v": v}) for d in (dev, host_device()))
    np.testing.assert_allclose(got["v"], want["v"], rtol=1e-6)  # the order of sums
    got, want = (made["x"].astype(np.float64) for made in (got, want))
    np.testing.assert_allclose(got, want, rtol=2.0**-7)  # BF16 of nearly the same number
    of = np.linalg.norm(x.astype(np.float64), axis=(1, 2))
    # BF16 has 8 significant bits: each number is off by at most 2^-8 of it.
    np.testing.assert_allclose(np.linalg.norm(got, axis=(1, 2)), of, rtol=2.0**-8)
    lengths = np.linalg.norm(got[0], axis=1)
    assert lengths[1] == 0
    np.testing.assert_allclose(np.delete(lengths, 1), of[0] / 299**0.5, rtol=2.0**-8)


@pytest.mark.parametrize("columns, first", [(48, 3), (36, 0), (35, 5)])
def test_even_of_any_columns(dev, rng, columns, first):
    """Rows that do not begin on 16 bytes; v begins at any element."""
    x = rng.normal(size=(3, 10, columns)).astype(BF16.numpy)
    v = rng.random(size=first + 30).astype(np.float32)

    def even(dev, x, v):
        muon.even(dev, x, v.rows(first, first + 30).view(3, 10), decay=0.9)

    got, want = (run(d, even, {"x": x, "v": v}) for d in (dev, host_device()))
    np.testing.assert_array_equal(got["v"][:first], v[:first])
    np.testing.assert_allclose(got["v"], want["v"], rtol=1e-6)  # the order of sums
    got, want = (made["x"].astype(np.float64) for made in (got, want))
    np.testing.assert_allclose(got, want, rtol=2.0**-7)


def test_diagonal(dev, rng):
    x = rng.normal(size=(3, 24, 24)).astype(BF16.numpy)
    got = assert_same(dev, partial(muon.diagonal, value=2.5), {"x": x})["x"]
    want = x + (2.5 * np.eye(24)).astype(BF16.numpy)
    np.testing.assert_array_equal(got, want)


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
    matrices = change.view(2, 8, 16)
    muon.normalize(dev, matrices, matrices)
    muon.diagonal(dev, change.view(1, 16, 16), 1.0)
    # A propose reads grad, reads and writes m, writes change;
    # normalize reads x twice and writes it.
    assert dev.bytes["muon_propose"] == 256 * (4 + 8 + 2) + 64
    assert dev.bytes["muon_apply"] == 256 * (8 + 2 + 2) + 64
    assert dev.bytes["muon_squares"] == 256 * 2 + 16
    assert dev.bytes["muon_normalize"] == 256 * 4 + 16
    for name, call in {
        "n": lambda: propose(dev, change.rows(0, 64), grad.rows(0, 64), m.rows(0, 64), scalars),
        "first": lambda: propose(dev, change, grad, m, scalars, first=64),
        "x": lambda: muon.even(dev, change, grad, decay=0.9),
        "v": lambda: muon.even(dev, matrices, grad, decay=0.9),
    }.items():
        with pytest.raises(ValueError, match=f"muon.*: {name} must"):
            call()
