"""GaLore's kernels on a device against their references."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.update import galore
from llmq.ref.update.galore import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run, step_scalars

SMALL = {name: case for name, case in CASES.items() if not name.startswith("rank")}


def symmetric(rng, count, side, falls=1.0):
    """Matrices whose eigenvalues fall from 1 to falls^2."""
    bases = np.linalg.qr(rng.normal(size=(count, side, side)))[0]
    x = bases * np.geomspace(1, falls, side)
    return (x @ x.transpose(0, 2, 1)).astype(np.float32)


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("falls", [0.5, 0.03])
def test_eigenvectors(dev, rng, case, falls):
    """Each vector is the reference's or its negative."""
    s = symmetric(rng, *SMALL[case], falls)
    got, want = (run(d, galore.eigen, {"s": s})["s"] for d in (dev, host_device()))
    side = s.shape[1]
    inner = np.abs(got @ want.transpose(0, 2, 1))
    # Neighbouring eigenvalues differ by a share of 1 - falls^(2 / side) or more, F32 rounds s by
    # 2^-24 of its largest element, and the rotations add up.
    gap = (1 - falls ** (2 / (side - 1))) * falls**2
    np.testing.assert_allclose(inner, np.broadcast_to(np.eye(side), inner.shape), atol=1e-5 / gap)
    np.testing.assert_allclose(got @ got.transpose(0, 2, 1), inner.round(), atol=1e-4)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_roots(dev, rng, scale):
    """Rows become orthonormal whatever their size, and in two steps where the first one's rounding
    leaves some oblique."""
    bases = np.linalg.qr(rng.normal(size=(2, 24, 24)))[0]
    x = (bases * np.geomspace(1, 1e-4, 24) @ np.linalg.qr(rng.normal(size=(24, 24)))[0]) * scale
    x = x.astype(np.float32)
    for _ in range(2):
        s = x @ x.transpose(0, 2, 1)
        x = run(dev, partial(galore.eigen, roots=True), {"s": s})["s"] @ x
    # Rows are as long as 1, up to rounding in rotations.
    identity = np.broadcast_to(np.eye(24), s.shape)
    np.testing.assert_allclose(x @ x.transpose(0, 2, 1), identity, atol=1e-4)


def test_zeros(dev):
    """A matrix of zeros has any orthonormal eigenvectors, and no roots."""
    s = np.zeros((2, 8, 8), np.float32)
    for made in run(dev, galore.eigen, {"s": s})["s"]:
        np.testing.assert_array_equal(made @ made.T, np.eye(8))
    assert not run(dev, partial(galore.eigen, roots=True), {"s": s})["s"].any()


def test_matrices_that_are_no_numbers_end(dev):
    run(dev, galore.eigen, {"s": np.full((1, 8, 8), np.nan, np.float32)})


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("skip", [0, 1])
def test_renew(dev, rng, dtype, skip):
    arrays = {
        "projection": rng.normal(size=(8, 47)).astype(dtype.numpy),
        "x": rng.normal(size=(8, 47)).astype(np.float32),
        "scalars": step_scalars(skip_update=skip),
    }
    got, want = (run(d, galore.renew, arrays)["projection"] for d in (dev, host_device()))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got, arrays["projection" if skip else "x"].astype(dtype.numpy))


def test_checks():
    dev = PlanDevice(HOST_SPEC)

    def make(name, *shape, dtype=F32):
        return dev.alloc(name, shape, dtype, "Projections")

    scalars = make("scalars", 16, dtype=I32)
    with pytest.raises(TypeError, match="galore_eigen: s must be"):
        galore.eigen(dev, make("s", 1, 8, 8, dtype=BF16))
    with pytest.raises(ValueError, match="galore_eigen: "):
        galore.eigen(dev, make("s", 1, 8, 9))
    with pytest.raises(TypeError, match="galore_renew: x must be"):
        galore.renew(dev, make("p", 8), make("x", 8, dtype=BF16), scalars)
    with pytest.raises(ValueError, match="galore_renew: "):
        galore.renew(dev, make("p", 8), make("x", 9), scalars)
