"""Routers on a device against the reference."""

import numpy as np
import pytest

from llmq.base.batch import FILLER_TARGET
from llmq.base.dtypes import BF16, F32, F64, I32, I64
from llmq.ops.experts import route as op
from llmq.ref.experts.route import CASES, sums_size
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run

SMALL = {name: case for name, case in CASES.items() if case[0] < 16384}
KINDS = [("softmax", False), ("softmax", True), ("sigmoid", True)]


def logits_of(rng, rows, E):
    """Multiples of 1/4, of which many are equal, and rows that are not finite."""
    logits = (rng.integers(-12, 13, (rows, E)) / 4).astype(np.float32)
    if rows > 8:
        logits[3, 1], logits[4], logits[5, 2] = np.nan, np.nan, -np.inf
        logits[6, : E // 2] = -np.inf
    return logits


def filler_of(rng, rows):
    """Targets, of which some are masked and some are those of filler."""
    return rng.choice(np.array([-100, FILLER_TARGET, 7], np.int32), rows)


def arrays_of(rng, rows, E, top_k, *, bias=False, filler=False):
    return {
        "chosen": np.full((rows, top_k), -1, np.int32),
        "weights": np.full((rows, top_k), np.nan, np.float32),
        "logits": logits_of(rng, rows, E),
        "bias": (rng.integers(-2, 3, E) * 4).astype(np.float32) if bias else None,
        "sums": rng.integers(0, 9, sums_size(E)),
        "targets": filler_of(rng, rows) if filler else None,
    }


@pytest.mark.parametrize("filler", [False, True])
@pytest.mark.parametrize(
    "case, kind, renormalize",
    [*((name, "softmax", True) for name in SMALL), *(("ragged", *kind) for kind in KINDS[::2])],
)
def test_route(dev, rng, case, kind, renormalize, filler):
    """Choices are the same; exp of the C library and NumPy differ in the last bit."""
    rows, E, top_k = CASES[case]
    arrays = arrays_of(rng, rows, E, top_k, bias=kind == "sigmoid", filler=filler)

    def call(dev, **tensors):
        op.route(dev, **tensors, kind=kind, renormalize=renormalize, scale=2.5)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_array_equal(got["chosen"], want["chosen"])
    np.testing.assert_allclose(got["weights"], want["weights"], rtol=2e-6)
    counts = [*range(E), 2 * E, 2 * E + 3]
    np.testing.assert_array_equal(got["sums"][counts], want["sums"][counts])
    np.testing.assert_allclose(got["sums"], want["sums"], rtol=2e-6, atol=4 * rows)
    owned = rows if not filler else np.count_nonzero(arrays["targets"] != FILLER_TARGET)
    assert got["sums"][2 * E] - arrays["sums"][2 * E] == owned
    without = run(dev, call, arrays | {"sums": None})
    for name in ("chosen", "weights"):  # whoever computes again has the same bits
        np.testing.assert_array_equal(without[name], got[name])


@pytest.mark.parametrize("case, groups", [("small", (8, 3)), ("ragged", (4, 1)), ("one", (4, 2))])
@pytest.mark.parametrize("kind", op.KINDS)
def test_groups_are_chosen_first(dev, rng, kind, case, groups):
    rows, E, top_k = CASES[case]
    arrays = arrays_of(rng, rows, E, top_k, bias=kind == "sigmoid") | {"sums": None}

    def call(dev, **tensors):
        op.route(dev, **tensors, kind=kind, groups=groups)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_array_equal(got["chosen"], want["chosen"])
    of_rows = [len(set(row)) for row in got["chosen"] // (E // groups[0])]
    assert max(of_rows) <= groups[1] and all(len(set(row)) == top_k for row in got["chosen"])


@pytest.mark.parametrize("target", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind, renormalize", KINDS)
@pytest.mark.parametrize(("with_losses", "filler"), [(False, True), (True, False), (True, True)])
def test_route_backward(dev, rng, kind, renormalize, with_losses, filler, target):
    rows, E, top_k = CASES["ragged"]
    arrays = arrays_of(rng, rows, E, top_k, bias=kind == "sigmoid")
    how = {"kind": kind, "renormalize": renormalize, "scale": 1.5}
    chosen = run(host_device(), lambda dev, **t: op.route(dev, **t, **how), arrays)["chosen"]
    arrays = {
        "d_logits": np.full((rows, E), np.nan, target.numpy),
        "d_weights": rng.normal(size=(rows, top_k)).astype(np.float32),
        "of_experts": rng.normal(size=(rows, E)).astype(np.float32) if with_losses else None,
        "logits": arrays["logits"],
        "chosen": chosen,
        "factors": rng.uniform(size=E + 1).astype(np.float32) if with_losses else None,
        "targets": filler_of(rng, rows) if filler else None,
    }

    def call(dev, **tensors):
        op.route_backward(dev, **tensors, **how)

    got, want = (run(d, call, arrays)["d_logits"].astype(np.float32) for d in (dev, host_device()))
    # Another exp and another order of sums; of BF16 one rounding.
    np.testing.assert_allclose(got, want, rtol=2e-5 if target is F32 else 2**-7, atol=1e-6)
    finite = np.isfinite(arrays["logits"]).all(axis=1) | np.isneginf(arrays["logits"]).any(axis=1)
    assert np.isfinite(got[finite]).all() and not finite[3:5].any()
    if with_losses and filler:
        bare = run(dev, call, arrays | {"factors": None})["d_logits"].astype(np.float32)
        rest = (arrays["targets"] == FILLER_TARGET) & finite
        np.testing.assert_allclose(
            got[rest], bare[rest], rtol=2e-5 if target is F32 else 2**-7, atol=1e-6
        )
        assert not np.allclose(got[finite & ~rest], bare[finite & ~rest], atol=1e-3)


@pytest.mark.parametrize("by_weight", [False, True])
def test_balance(dev, rng, by_weight):
    layers, rows, E, top_k = 5, 70, 60, 4
    arrays = {
        "factors": np.full(E + 1, np.nan, np.float32),
        "losses": rng.uniform(size=4),
        "totals": rng.integers(0, 1 << 40, (layers, sums_size(E))),
        "sums": np.stack([arrays_of(rng, rows, E, top_k)["sums"] << 33] * layers),
        "targets": rng.integers(-1, 3, 1100, np.int32),
        "by": rng.uniform(size=1100).astype(np.float32) if by_weight else None,
    }
    arrays["sums"][:, 2 * E] = rows
    arrays["sums"][:, :E] >>= 33

    def call(dev, **tensors):
        op.balance(dev, **tensors, aux=0.01, z=0.001)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    for name in ("sums", "totals"):
        np.testing.assert_array_equal(got[name], want[name])
    assert not got["sums"].any()
    # F64, summed in another order.
    np.testing.assert_allclose(got["factors"], want["factors"], rtol=1e-6)
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-12)
    nothing = run(dev, call, arrays | {"sums": np.zeros_like(arrays["sums"])})
    assert not nothing["factors"].any()
    np.testing.assert_array_equal(nothing["losses"], arrays["losses"])


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def make(shape, dtype):
        return dev.alloc("t", shape, dtype, "Activations")

    logits, chosen, weights = make((4, 8), F32), make((4, 2), I32), make((4, 2), F32)
    op.route(dev, chosen, weights, logits)
    with pytest.raises(ValueError, match="route: kind must be one of softmax, sigmoid, got 'tanh'"):
        op.route(dev, chosen, weights, logits, kind="tanh")
    with pytest.raises(ValueError, match="route: E must be at most 512, got 520"):
        op.route(dev, chosen, weights, make((4, 520), F32))
    with pytest.raises(ValueError, match="top_k must be at most 8, got 9"):
        op.route(dev, make((4, 9), I32), weights, logits)
    with pytest.raises(ValueError, match="2 of 8 experts cannot be in 1 of 8 groups"):
        op.route(dev, chosen, weights, logits, groups=(8, 1))
    sums, losses, targets = make((3, 20), I64), make((4,), F64), make((4,), I32)
    op.balance(dev, make((9,), F32), losses, sums, sums, targets, aux=0.1, z=0.0)
