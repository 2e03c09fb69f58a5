"""Cross-entropy on a device against the reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32, STAT, TOKEN_STATS
from llmq.ops.loss import cross_entropy as op
from llmq.ref.loss.cross_entropy import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run

SMALL = {name: shape for name, shape in CASES.items() if shape[0] < 100}
# exp2(x * log2(e)) has the error of its rounded argument: 2^-24 * 30 for the smallest exponentials
# here; p - 1 cancels. A BF16 gradient may then round the other way, one unit.
GRADIENT = {F32: {"rtol": 2**-18, "atol": 2**-23}, BF16: {"rtol": 2**-7, "atol": 2**-23}}
# A sum of up to 150,000 terms in another order, and the logarithm of it.
LSE = {"rtol": 2**-20}
LOSS = {"atol": 2**-18}  # lse - logit, both below 32


def _arrays(rng, rows, vocab, padded_vocab, dtype):
    logits = rng.normal(size=(rows, padded_vocab)) * 3
    logits[:, vocab:] = np.nan  # must be ignored
    targets = rng.integers(0, vocab, rows)
    targets[0] = vocab - 1
    targets[1::3] = -100
    return {
        "logits": logits.astype(dtype.numpy),
        "losses": np.full(rows, np.nan, np.float32),
        "lse": np.full(rows, np.nan, np.float32),
        "targets": targets.astype(np.int32),
    }


def _call(vocab, z_loss):
    def call(dev, **tensors):
        op.forward_backward(dev, **tensors, vocab_size=vocab, z_loss=z_loss)

    return call


def _compare(got, want, dtype):
    logits, expected = got["logits"].astype(np.float32), want["logits"].astype(np.float32)
    np.testing.assert_allclose(logits, expected, **GRADIENT[dtype])
    np.testing.assert_allclose(got["lse"], want["lse"], **LSE)
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=0, **LOSS)
    masked = want["targets"] < 0
    assert not logits[masked].any() and not got["losses"][masked].any()


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows, vocab, padded_vocab", SMALL.values(), ids=SMALL)
def test_forward_backward(dev, rng, rows, vocab, padded_vocab, dtype, z_loss):
    arrays = _arrays(rng, rows, vocab, padded_vocab, dtype)
    call = _call(vocab, z_loss)
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    assert np.isfinite(want["logits"].astype(np.float32)).all()
    _compare(got, want, dtype)
    assert not got["logits"][:, vocab:].astype(np.float32).any()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows, vocab, padded_vocab", SMALL.values(), ids=SMALL)
def test_two_pass_kernel(dev, rng, rows, vocab, padded_vocab, dtype):
    """The kernel that older GPUs use for long rows."""
    arrays = _arrays(rng, rows, vocab, padded_vocab, dtype)

    def call(dev, logits, losses, lse, targets):
        args = (logits, losses, lse, targets, None, rows, vocab, padded_vocab, 1e-2, 1.0)
        dev.launch(op.FORWARD_BACKWARD, rows, op.THREADS, args)

    got = run(dev, call, arrays)
    _compare(got, run(host_device(), call, arrays), dtype)
    assert not got["logits"][:, vocab:].astype(np.float32).any()


@pytest.mark.parametrize("dtype", [F32, BF16, E5M2], ids=str)
@pytest.mark.parametrize("rows, vocab, padded_vocab", list(SMALL.values())[:3], ids=list(SMALL)[:3])
def test_a_soft_cap_stands_for_each_logit(dev, rng, rows, vocab, padded_vocab, dtype):
    """With codes too; its slope is the logits' own."""
    arrays = _arrays(rng, rows, vocab, padded_vocab, BF16 if dtype is E5M2 else dtype)
    cap, codes = 4.0, {}
    if dtype is E5M2:
        codes = {"codes": np.full((rows, padded_vocab), 0xA5, np.uint8).view(dtype.numpy)}

    def call(dev, **tensors):
        scale = {"code_scale": 2.0**-7} if codes else {}
        op.forward_backward(dev, **tensors, vocab_size=vocab, z_loss=1e-2, softcap=cap, **scale)

    def losses(dev, logits, losses, lse, targets):
        op.forward(dev, losses, lse, logits, targets, vocab, softcap=cap)

    got, want = (run(d, call, arrays | codes) for d in (dev, host_device()))
    np.testing.assert_allclose(got["lse"], want["lse"], **LSE)
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=0, **LOSS)
    plain = run(dev, losses, arrays)
    assert plain["lse"].tobytes() == got["lse"].tobytes()
    x = arrays["logits"][:, :vocab].astype(np.float64)
    y, counted = cap * np.tanh(x / cap), arrays["targets"] >= 0
    lse = np.log(np.exp(y).sum(1))
    np.testing.assert_allclose(got["lse"], lse, **LSE)
    d = np.exp(y - lse[:, None]) * (1 + 1e-2 * lse[:, None])
    d[counted, arrays["targets"][counted]] -= 1
    d *= counted[:, None] * (1 - (y / cap) ** 2)
    for each in (got, want):
        if dtype is E5M2:
            found = each["codes"].astype(np.float32)[:, :vocab] * np.float32(2.0**-7)
            np.testing.assert_allclose(found, d, **CODE[E5M2], atol=LEAST[E5M2] * 2.0**-8)
        else:
            assert not each["logits"][:, vocab:].astype(np.float32).any()
            found = each["logits"].astype(np.float32)[:, :vocab]
            # A slope near 0 is 1 less a square that is rounded.
            bound = {"rtol": GRADIENT[dtype]["rtol"], "atol": 2**-21}
            np.testing.assert_allclose(found, d, **bound)


# The bound on what a code stands for: half the distance of two codes, and the error of a gradient.
CODE = {E4M3: {"rtol": 2**-4 + 2**-17}, E5M2: {"rtol": 2**-3 + 2**-17}}
LEAST = {E4M3: 2.0**-9, E5M2: 2.0**-16}  # the distance of codes around 0


@pytest.mark.parametrize("two_passes", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("rows, vocab, padded_vocab", SMALL.values(), ids=SMALL)
def test_codes(dev, rng, rows, vocab, padded_vocab, dtype, two_passes, monkeypatch):
    arrays = _arrays(rng, rows, vocab, padded_vocab, BF16)
    arrays["codes"] = np.full((rows, padded_vocab), 0xA5, np.uint8).view(dtype.numpy)
    scale = 2.0**-7

    def call(dev, codes, **tensors):
        args = {"vocab_size": vocab, "z_loss": 1e-2, "codes": codes, "code_scale": scale}
        op.forward_backward(dev, **tensors, **args)

    if two_passes:
        monkeypatch.setattr(op, "register_layout", lambda *args: None)
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    exact = {name: a for name, a in arrays.items() if name != "codes"}
    exact["logits"] = exact["logits"].astype(np.float32)
    gradient = run(host_device(), _call(vocab, 1e-2), exact)["logits"]
    for result in (got, want):
        decoded = result["codes"].astype(np.float32) * np.float32(scale)
        np.testing.assert_allclose(decoded, gradient, **CODE[dtype], atol=LEAST[dtype] * scale / 2)
        assert not result["codes"][:, vocab:].view(np.uint8).any()
        assert not result["codes"][want["targets"] < 0].view(np.uint8).any()
        assert result["logits"].tobytes() == arrays["logits"].tobytes()
    np.testing.assert_allclose(got["lse"], want["lse"], **LSE)
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=0, **LOSS)


def weighted_gradient(dev, arrays, weights, vocab, codes=None):
    """F32, decoded; losses and lse have no weights."""

    def call(dev, codes=None, **tensors):
        scale = {} if codes is None else {"codes": codes, "code_scale": 2.0**-7}
        op.forward_backward(dev, **tensors, vocab_size=vocab, z_loss=1e-2, **scale)

    arrays = arrays if weights is None else arrays | {"weights": weights}
    got = run(dev, call, arrays if codes is None else arrays | {"codes": codes})
    if codes is None:
        return got, got["logits"].astype(np.float32)
    return got, got["codes"].astype(np.float32) * np.float32(2.0**-7)


@pytest.mark.parametrize("two_passes", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, E5M2], ids=str)
def test_rows_have_their_gradient_times_their_weight(dev, rng, dtype, two_passes, monkeypatch):
    """A negative one, 0, and one on a masked row among them. A power of two rounds alike."""
    if two_passes:
        monkeypatch.setattr(op, "register_layout", lambda *args: None)
    rows, vocab, padded_vocab = SMALL["full"]
    codes = np.zeros((rows, padded_vocab), dtype.numpy) if dtype is E5M2 else None
    arrays = _arrays(rng, rows, vocab, padded_vocab, BF16 if dtype is E5M2 else dtype)
    weights = np.array([-2, 8, 0.5, 0, 1], np.float32)
    plain, gradient = weighted_gradient(dev, arrays, None, vocab, codes)
    found, weighted = weighted_gradient(dev, arrays, weights, vocab, codes)
    counted = weights[:, None] * gradient
    np.testing.assert_allclose(weighted, counted, rtol=2**-18, atol=LEAST[E5M2] / 64)
    for name in ("losses", "lse"):
        np.testing.assert_array_equal(found[name], plain[name])
    assert counted[0].any() and not weighted[arrays["targets"] < 0].any()


def test_codes_of_extremes(dev):
    """NaN stays NaN; what exceeds the largest code becomes it."""
    x = np.zeros((3, 64), BF16.numpy)
    x[0, 7], x[2, 5] = np.nan, 100
    arrays = {
        "logits": x,
        "losses": np.zeros(3, np.float32),
        "lse": np.zeros(3, np.float32),
        "targets": np.array([3, 9, 1], np.int32),
        "codes": np.zeros((3, 64), E5M2.numpy),
    }

    def call(dev, codes, **tensors):
        op.forward_backward(dev, **tensors, vocab_size=64, z_loss=0, codes=codes, code_scale=2**-17)

    codes = run(dev, call, arrays)["codes"].astype(np.float32)
    assert np.isnan(codes[0]).all() and np.isfinite(codes[1:]).all()
    assert codes[2, 5] == 57344 and codes[2, 1] == -57344 and not codes[2, 10:].any()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows, vocab, padded_vocab", SMALL.values(), ids=SMALL)
def test_forward(dev, rng, rows, vocab, padded_vocab, dtype):
    arrays = _arrays(rng, rows, vocab, padded_vocab, dtype)

    def call(dev, logits, losses, lse, targets):
        op.forward(dev, losses, lse, logits, targets, vocab)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    assert got["logits"].tobytes() == arrays["logits"].tobytes()
    np.testing.assert_allclose(got["lse"], want["lse"], **LSE)
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=0, **LOSS)
    assert not got["losses"][want["targets"] < 0].any()


def test_extreme_logits(dev):
    """Infinities that mask a token, values far apart, and a row that is all equal."""
    x = np.zeros((3, 64), np.float32)
    x[0, ::2], x[1, 5], x[1, 6:] = -np.inf, 1e4, -1e4
    arrays = {
        "logits": x,
        "losses": np.full(3, np.nan, np.float32),
        "lse": np.full(3, np.nan, np.float32),
        "targets": np.array([1, 5, 63], np.int32),
    }
    got = run(dev, _call(64, 0.0), arrays)
    want = np.array([np.log(32), 0, np.log(64)])
    np.testing.assert_allclose(got["losses"], want, rtol=2**-22)  # the logarithm's last place
    np.testing.assert_array_equal(got["logits"][0, :4], [0, 1 / 32 - 1, 0, 1 / 32])
    np.testing.assert_array_equal(got["logits"][1], 0)
    np.testing.assert_array_equal(got["logits"][2, 62:], [1 / 64, 1 / 64 - 1])


def test_nan_is_not_hidden(dev):
    x = np.zeros((1, 64), np.float32)
    x[0, 7] = np.nan
    one = np.zeros(1, np.float32)
    arrays = {"logits": x, "losses": one, "lse": one, "targets": np.array([3], np.int32)}
    got = run(dev, _call(64, 0.0), arrays)
    assert np.isnan(got["losses"]).all() and np.isnan(got["logits"]).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("B, T", [(1, 1), (3, 700), (2, 1500)])
def test_stats(dev, rng, B, T, weighted):
    targets = rng.integers(-2, 5, (B, T)).astype(np.int32)
    arrays = {
        "stats": np.arange(len(TOKEN_STATS), dtype=np.float64),
        # Multiples of 1/64: exact in any order.
        "losses": (rng.integers(0, 640, (B, T)) / 64 * (targets >= 0)).astype(np.float32),
        "lse": (rng.integers(0, 640, (B, T)) / 64).astype(np.float32),
        "targets": targets,
    }
    if weighted:
        arrays["weights"] = (rng.integers(-64, 65, (B, T)) / 32).astype(np.float32)
    got, want = run(dev, op.stats, arrays), run(host_device(), op.stats, arrays)
    np.testing.assert_array_equal(got["stats"], want["stats"])
    total = (arrays["losses"] * arrays.get("weights", 1)).sum(dtype=np.float64)
    assert got["stats"][STAT["loss"]] == total
    assert got["stats"][STAT["count"]] == 1 + (targets >= 0).sum()
    if weighted:
        of_weights = partial(op.stats, by_weight=True)
        arrays["stats"] = np.zeros(len(TOKEN_STATS) + 1)
        got, want = run(dev, of_weights, arrays), run(host_device(), of_weights, arrays)
        np.testing.assert_array_equal(got["stats"], want["stats"])
        mass = arrays["weights"][targets >= 0].sum(dtype=np.float64)
        assert got["stats"][STAT["count"]] == mass and got["stats"][-1] == (targets >= 0).sum()


def test_stats_of_masked_rows_change_nothing(dev):
    arrays = {
        "stats": np.arange(len(TOKEN_STATS), dtype=np.float64),
        "losses": np.zeros((2, 40), np.float32),
        "lse": np.full((2, 40), 50, np.float32),
        "targets": np.full((2, 40), -100, np.int32),
    }
    np.testing.assert_array_equal(run(dev, op.stats, arrays)["stats"], arrays["stats"])


@pytest.mark.parametrize(
    "row_bytes, capability, layout",
    [
        (2 * 320, 90, (256, 1, 1, 1)),
        (2 * 32768, 90, (256, 16, 1, 1)),
        (2 * 50304, 80, (512, 13, 1, 1)),
        (2 * 50304, 90, (512, 13, 1, 1)),
        (2 * 128256, 90, (256, 16, 4, 4)),
        (2 * 151936, 100, (256, 19, 4, 4)),
        (4 * 262144, 120, (512, 16, 8, 4)),
    ],
)
def test_register_layout(row_bytes, capability, layout):
    names = ("THREADS", "VECTORS", "CLUSTER", "ROWS")
    assert op.register_layout(row_bytes, capability) == dict(zip(names, layout, strict=True))


def test_rows_that_do_not_fit_into_registers():
    assert op.register_layout(2 * 151936, 89) is None
    assert op.register_layout(16 * 19 * 512 * 8, 90)["VECTORS"] == 19
    assert op.register_layout(16 * 19 * 512 * 8 + 16, 90) is None


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    x, row, targets = make((4, 64), BF16), make((4,), F32), make((4,), I32)
    name = "cross_entropy_forward_backward(_registers)?: "
    with pytest.raises(ValueError, match=name + "padded_vocab must be a multiple of 8, got 60"):
        op.forward_backward(dev, make((4, 60), BF16), row, row, targets, 60, 0.0)
    with pytest.raises(ValueError, match=name + "vocab must be at most 64, got 65"):
        op.forward_backward(dev, x, row, row, targets, 65, 0.0)


def test_traffic():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    x, row, targets = make((4, 64), BF16), make((4,), F32), make((4,), I32)
    op.forward_backward(dev, x, row, row, targets, 60, 0.0)
    in_place = sum(dev.bytes.values())
    assert in_place == 2 * 4 * 64 * 2 + 3 * 4 * 4
    op.forward_backward(dev, x, row, row, targets, 60, 0.0, codes=make((4, 64), E5M2))
    assert sum(dev.bytes.values()) - in_place == 4 * 64 * (2 + 1) + 3 * 4 * 4
