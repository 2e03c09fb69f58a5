"""Rows of exponentials of logits on a device, against the reference and cross-entropy."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops import cross_entropy, exp_rows
from llmq.ref.exp_rows import CASES
from llmq.ref.matmul_fused import TILE, matmul_exp
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def arrays_of(rng, rows, columns, K, vocab, size=4.0):
    """The arguments of `finish` where the product is computed by its reference. size: of logits."""
    x, weight = (
        (rng.normal(size=(n, K)) * (size * K**-0.5) ** 0.5).astype(BF16.numpy)
        for n in (rows, columns)
    )
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    targets[0], targets[1::4] = vocab - 1, -100
    row = np.full(rows, np.nan, np.float32)
    arrays = {"x": x, "weight": weight, "targets": targets, "shift": row}
    shift = run(host_device(), exp_rows.shift, arrays)["shift"]
    e = np.full((rows, columns), np.nan, BF16.numpy)
    sums, logits = np.empty((-(-columns // TILE), rows), np.float32), row.copy()
    operands = (x, weight, *[None] * 4, rows, columns, K)
    matmul_exp(*operands, e, sums, logits, shift, targets, vocab)
    results = {"losses": row, "lse": row, "factors": row}
    return arrays | results | {"e": e, "sums": sums, "shift": shift, "target_logits": logits}


def finished(dev, arrays, vocab, z_loss, scale_x=True, **more):
    def call(dev, **tensors):
        exp_rows.finish(dev, **tensors, vocab_size=vocab, z_loss=z_loss, scale_x=scale_x, **more)

    return run(dev, call, arrays)


def check(got, want):
    """Sums in another order, logarithms; a BF16 may then round the other way, one unit."""
    for name in ("losses", "lse"):
        np.testing.assert_allclose(got[name], want[name], rtol=2**-20, atol=2**-18, err_msg=name)
    np.testing.assert_allclose(got["factors"], want["factors"], rtol=2**-18)
    for name in ("e", "x"):
        found, expected = (result[name].astype(np.float32) for result in (got, want))
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-37)  # below it is 0


def gradient(found):
    """The gradient of logits: factor * e."""
    return found["e"].astype(np.float64) * found["factors"][:, None]


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_shift(dev, rng, case):
    rows, columns, K, vocab = case
    arrays = {
        "shift": np.full(rows, np.nan, np.float32),
        "x": (rng.integers(-8, 9, (rows, K)) / 8).astype(BF16.numpy),  # exact in any order
        "weight": (rng.integers(-8, 9, (columns, K)) / 8).astype(BF16.numpy),
        "targets": rng.integers(-1, vocab, rows).astype(np.int32),
    }
    got, want = (run(d, exp_rows.shift, arrays)["shift"] for d in (dev, host_device()))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_finish(dev, rng, case, z_loss):
    arrays, vocab = arrays_of(rng, *case), case[-1]
    got, want = (finished(d, arrays, vocab, z_loss) for d in (dev, host_device()))
    check(got, want)
    masked = arrays["targets"] < 0
    assert not gradient(got)[masked].any() and not got["losses"][masked].any()


@pytest.mark.parametrize("again", [False, True])
def test_gradient_is_that_of_cross_entropy(dev, rng, again):
    """It is that of the same logits, but where F32's sums round otherwise. again: from them,
    factors of 1."""
    rows, *_, vocab = case = SMALL["blocks"]
    arrays = arrays_of(rng, *case)
    found = finished(dev, arrays, vocab, 1e-2, limit=1.0 if again else exp_rows.LIMIT)
    logits = arrays["x"].astype(np.float32) @ arrays["weight"].astype(np.float32).T
    empty = np.full(rows, np.nan, np.float32)
    beside = {"logits": logits.astype(BF16.numpy).astype(np.float32), "losses": empty, "lse": empty}

    def call(dev, **tensors):
        cross_entropy.forward_backward(dev, **tensors, vocab_size=vocab, z_loss=1e-2)

    want = run(host_device(), call, beside | {"targets": arrays["targets"]})
    for name in ("losses", "lse"):
        np.testing.assert_allclose(found[name], want[name], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(gradient(found), want["logits"], rtol=2**-6, atol=2**-9)
    assert not found["e"][:, vocab:].astype(np.float32).any()
    assert set(found["factors"]) == {0, 1} if again else (found["factors"] != 1).all()


@pytest.mark.parametrize("again", [False, True])
def test_rows_have_their_gradient_times_their_weight(dev, rng, again):
    """The gradient itself, and x, which is multiplied by the factors; e, losses and lse have
    none."""
    rows, *_, vocab = case = SMALL["blocks"]
    arrays, limit = arrays_of(rng, *case), {"limit": 1.0 if again else exp_rows.LIMIT}
    weights = 2.0 ** rng.integers(-2, 3, rows).astype(np.float32) * rng.choice([-1, 1], rows)
    weights = weights.astype(np.float32)
    plain = finished(dev, arrays, vocab, 1e-2, **limit)
    found = finished(dev, arrays | {"weights": weights}, vocab, 1e-2, **limit)
    for name in ("e", "losses", "lse"):
        np.testing.assert_array_equal(found[name], plain[name], err_msg=name)
    np.testing.assert_array_equal(found["factors"], plain["factors"] * weights)
    want = plain["x"].astype(np.float32) * weights[:, None]
    np.testing.assert_array_equal(found["x"].astype(np.float32), want)
    on_host = finished(host_device(), arrays | {"weights": weights}, vocab, 1e-2, **limit)
    check(found, on_host)


def test_rows_that_are_computed_again(dev, rng):
    """Losses that are too large for exponentials, and a shift far from all logits."""
    rows, *_, vocab = case = SMALL["blocks"]
    arrays = arrays_of(rng, *case, size=40.0)
    arrays["shift"][40] = 300
    arrays["e"][40], arrays["sums"][:, 40] = 0, 0
    got, want = (finished(d, arrays, vocab, 0.0) for d in (dev, host_device()))
    check(got, want)
    far = np.flatnonzero(got["losses"] > 102)  # and the margin
    assert 40 in np.flatnonzero(got["factors"] == 1) and 0 < len(far) < rows
    assert (got["factors"][far] == 1).all() and np.isfinite(gradient(got)).all()
    np.testing.assert_allclose(gradient(got)[arrays["targets"] >= 0].sum(axis=1), 0, atol=2**-7)


def test_a_share_of_nothing(dev, rng):
    """If 1 + z_loss * lse is 0, the gradient is that of the target alone."""
    *_, vocab = case = SMALL["small"]
    arrays = arrays_of(rng, *case)
    lse = finished(host_device(), arrays, vocab, 0.0)["lse"][0]
    found = finished(dev, arrays, vocab, float(-1 / lse))
    want = np.zeros(case[1])
    want[arrays["targets"][0]] = -1
    np.testing.assert_allclose(gradient(found)[0], want, rtol=2**-8, atol=2**-19)


def test_nan_is_not_hidden(dev, rng):
    arrays = arrays_of(rng, *SMALL["small"])
    arrays["sums"][0, 2] = np.nan
    found = finished(dev, arrays, 90, 0.0)
    assert np.isnan(found["losses"]).nonzero()[0].tolist() == [2]
    assert np.isnan(found["factors"][2]) and np.isnan(found["x"][2].astype(np.float32)).all()


def test_x_stays(dev, rng):
    arrays = arrays_of(rng, *SMALL["small"])
    got, want = (finished(d, arrays, 90, 0.0, scale_x=False) for d in (dev, host_device()))
    check(got, want)
    np.testing.assert_array_equal(got["x"], arrays["x"])


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_scale(dev, rng, case):
    rows, _, K, _ = case
    arrays = {
        "d": rng.normal(size=(rows, K)).astype(BF16.numpy),
        "factors": rng.normal(size=rows).astype(np.float32),
    }
    got, want = (run(d, exp_rows.scale, arrays)["d"] for d in (dev, host_device()))
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


def test_traffic_and_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def tensor(dtype, *shape):
        return dev.alloc("t", shape, dtype, "Weights")

    x, weight, row, targets = (
        tensor(BF16, 32, 64), tensor(BF16, 96, 64), tensor(F32, 32), tensor(I32, 32)
    )  # fmt: skip
    call = {"e": tensor(BF16, 32, 96), "x": x, "losses": row, "lse": row, "factors": row}
    call |= {"sums": tensor(F32, 1, 32), "shift": row, "target_logits": row, "weight": weight}
    call |= {"targets": targets, "vocab_size": 90, "z_loss": 0.0, "scale_x": True}
    exp_rows.finish(dev, **call)
    assert sum(dev.bytes.values()) == 2 * x.nbytes + (3 + 4) * row.nbytes  # not e, not weight
    for change, error, match in (
        ({"e": x}, ValueError, r"e must have shape \(32, 96\)"),
        ({"sums": row}, ValueError, "sums must have shape"),
        ({"targets": row}, TypeError, "targets must be I32"),
        ({"vocab_size": 97}, ValueError, r"vocab_size must be in \[1, 96\]"),
        ({"x": tensor(BF16, 32, 60)}, ValueError, "K a multiple of 8"),
    ):
        with pytest.raises(error, match=match):
            exp_rows.finish(dev, **call | change)
    with pytest.raises(ValueError, match=r"exp_rows\.scale: factors must have shape \(32,\)"):
        exp_rows.scale(dev, x, tensor(F32, 31))
    with pytest.raises(TypeError, match=r"exp_rows\.shift: weight must be BF16"):
        exp_rows.shift(dev, row, x, tensor(F32, 96, 64), targets)
