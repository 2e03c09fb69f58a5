"""Rows of codes of exponentials of logits on a device, against the reference and cross-entropy."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.model.head import gradient_scale
from llmq.ops import cross_entropy, exp_codes, matmul_exp_codes
from llmq.ops.common import num_sums
from llmq.ref.exp_codes import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import compared, host_device, run
from tests.own_products import whole

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def operands(rng, rows, columns, K, vocab, size=4.0):
    """size: of logits, as long as the scales are 1."""
    scale = (size * K**-0.5) ** 0.5
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    targets[0], targets[1::4] = vocab - 1, -100
    return {
        "x": (rng.normal(size=(rows, K)) * scale).astype(E4M3.numpy),
        "weight": (rng.normal(size=(columns, K)) * scale).astype(E4M3.numpy),
        "scale_x": np.ones(1, np.float32),
        "scale_weight": np.ones(1, np.float32),
        "targets": targets,
    }


def whole_way(dev, vocab, z_loss, largest=57344.0, **arrays):
    """All operations: losses, lse and the gradient as F32, of the rows and transposed."""
    (rows, K), columns = arrays["x"].shape, arrays["weight"].shape[0]
    scale = gradient_scale(z_loss)

    def call(dev, x, weight, scale_x, scale_weight, targets, d, **t):
        exp_codes.shift(dev, t["shift"], x, weight, scale_x, scale_weight, targets)
        of_product = (weight, scale_x, scale_weight, t["shift"], targets)
        sums, logits = t["sums"], t["target_logits"]
        matmul_exp_codes.forward(dev, t["e"], sums, logits, x, *of_product, vocab)
        results = [t[name] for name in ("losses", "lse", "factors", "own", "masks", "shift")]
        exp_codes.finish(dev, *results, sums, logits, targets, z_loss, largest=largest)
        exp_codes.gather(dev, t["listed"], t["listed_x"], t["masks"], x)
        matmul_exp_codes.again(dev, t["e"], t["listed_x"], *of_product, t["listed"], vocab)
        exp_codes.turn(dev, t["turned"], t["e"], t["factors"], t["own"], targets, scale)
        exp_codes.input_gradient(dev, d, t["factors"], t["own"], weight, scale_weight, targets)

    row = np.full(rows, np.nan, np.float32)
    arrays |= dict.fromkeys(("shift", "losses", "lse", "factors", "own", "target_logits"), row)
    arrays["masks"] = np.full(exp_codes.num_masks(rows), -1, np.int32)
    arrays["sums"] = np.full((num_sums(columns), rows), np.nan, np.float32)
    arrays["e"] = np.full((rows, columns), np.nan, E5M2.numpy)
    arrays["turned"] = np.full((columns, rows), np.nan, E5M2.numpy)
    arrays["listed"] = np.full(1 + rows, -1, np.int32)
    arrays["listed_x"] = np.full((rows, K), np.nan, E4M3.numpy)
    arrays["d"] = np.ones((rows, K), BF16.numpy)
    found = run(dev, call, arrays)
    found["turned"] = found["turned"].astype(np.float32).T * scale
    found["gradient"] = found["e"].astype(np.float32) * found["factors"][:, None]
    counted = np.flatnonzero(arrays["targets"] >= 0)
    found["gradient"][counted, arrays["targets"][counted]] = found["own"][counted]
    return found


def wanted(arrays, vocab, z_loss):
    """Of the same logits: losses, lse and logits as cross-entropy leaves them."""
    logits = arrays["x"].astype(np.float32) @ arrays["weight"].astype(np.float32).T
    empty = np.full(len(logits), np.nan, np.float32)
    beside = {"logits": logits.astype(BF16.numpy).astype(np.float32), "losses": empty, "lse": empty}

    def call(dev, **tensors):
        cross_entropy.forward_backward(dev, **tensors, vocab_size=vocab, z_loss=z_loss)

    return run(host_device(), call, beside | {"targets": arrays["targets"]})


def check_gradient(found, want, arrays):
    """E5M2 has two bits, and numbers below 2^-17 of the target's probability are 0. Logits are
    rounded to BF16, which F32's sums in another order may do otherwise."""
    for name in ("losses", "lse"):
        np.testing.assert_allclose(found[name], want[name], rtol=1e-3, atol=1e-3)
    counted = np.flatnonzero(arrays["targets"] >= 0)
    own = arrays["targets"][counted]
    np.testing.assert_allclose(
        found["own"][counted], want["logits"][counted, own], rtol=2**-6, atol=2**-9
    )
    for name, rtol in (("gradient", 0.15), ("turned", 0.3)):
        np.testing.assert_allclose(found[name], want["logits"], rtol=rtol, atol=2**-16)
    assert not found["d"][arrays["targets"] < 0].astype(np.float32).any()


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("again", [False, True])
def test_gradient_is_that_of_cross_entropy(rng, z_loss, again):
    """again: of all rows."""
    *_, vocab = case = SMALL["blocks"]
    arrays = operands(rng, *case, size=1.0)
    found = whole_way(host_device(), vocab, z_loss, largest=0.0 if again else 57344.0, **arrays)
    check_gradient(found, wanted(arrays, vocab, z_loss), arrays)
    counted = np.flatnonzero(arrays["targets"] >= 0)
    assert found["listed"][0] == (len(counted) if again else 0)
    assert found["listed"][1 : 1 + len(counted) * again].tolist() == counted.tolist() * again


def test_rows_whose_codes_would_be_clamped(rng):
    """Losses of more than 11 that are another column's; those of more than 88 are infinite."""
    *_, vocab = case = SMALL["blocks"]
    arrays = operands(rng, *case, size=8.0)
    far = wanted(arrays, vocab, 0.0)["losses"]
    found = whole_way(host_device(), vocab, 0.0, **arrays)
    listed = found["listed"][1 : 1 + found["listed"][0]]
    assert 0 < len(listed) < len(far) and (far[listed] > 10.9).all()
    assert set(np.flatnonzero(far > 17.6)) <= set(listed)
    check_gradient(found, wanted(arrays, vocab, 0.0), arrays)


def test_what_f32_has_no_exponential_of(dev, rng):
    arrays = finish_arrays(rng, 16, 3)
    arrays["sums"][1, 2], arrays["sums"][0, 4] = np.inf, np.nan
    arrays["targets"][[2, 4]] = 0
    found = finished(dev, arrays, 0.0)
    assert np.isinf(found["losses"][2]) and np.isnan(found["losses"][4])
    assert np.isnan(found["own"][[2, 4]]).all() and not found["masks"].any()


def finish_arrays(rng, rows, tiles):
    row = np.full(rows, np.nan, np.float32)
    arrays = dict.fromkeys(("losses", "lse", "factors", "own"), row)
    targets = rng.integers(-1, 9, rows).astype(np.int32)
    return arrays | {
        "masks": np.full(exp_codes.num_masks(rows), -1, np.int32),
        "shift": rng.normal(size=rows).astype(np.float32) * 9,
        "sums": np.exp(rng.normal(size=(tiles, rows)) * 3).astype(np.float32),
        "target_logits": rng.normal(size=rows).astype(np.float32) * 9,
        "targets": targets,
    }


def finished(dev, arrays, z_loss, **more):
    def call(dev, **tensors):
        exp_codes.finish(dev, **tensors, z_loss=z_loss, **more)

    return run(dev, call, arrays)


@pytest.mark.parametrize(("rows", "z_loss"), [(16, 0.0), (80, 1e-2)])
def test_finish(dev, rng, rows, z_loss):
    arrays = finish_arrays(rng, rows, 29)
    got, want = (finished(d, arrays, z_loss, largest=400.0) for d in (dev, host_device()))
    np.testing.assert_array_equal(got["masks"], want["masks"])
    assert 0 < np.count_nonzero(np.unpackbits(got["masks"].view(np.uint8))) < rows
    for name in ("losses", "lse", "shift", "factors", "own"):  # sums in another order, logarithms
        np.testing.assert_allclose(got[name], want[name], rtol=2**-16, atol=2**-18, err_msg=name)


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_shift(dev, rng, case):
    rows, columns, K, _ = case
    arrays = operands(rng, *case) | {"shift": np.full(rows, np.nan, np.float32)}
    arrays |= {"x": whole(rng, E4M3, rows, K), "weight": whole(rng, E4M3, columns, K)}
    compared(dev, exp_codes.shift, arrays)


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_gather(dev, rng, share):
    rows, K = 1072, 48
    set_ = rng.random(rows + 16) < share
    set_[rows:] = False
    arrays = {
        "listed": np.full(1 + rows, -7, np.int32),
        "listed_x": np.full((rows, K), np.nan, E4M3.numpy),
        "masks": np.packbits(set_, bitorder="little").view(np.int32),
        "x": whole(rng, E4M3, rows, K),
    }
    compared(dev, exp_codes.gather, arrays)


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_input_gradient(dev, rng, case):
    rows, _, K, _ = case
    arrays = {name: operands(rng, *case)[name] for name in ("weight", "scale_weight", "targets")}
    for name in ("factors", "own"):
        arrays[name] = rng.normal(size=rows).astype(np.float32)
    arrays |= {"scale_weight": np.full(1, 0.5, np.float32), "d": rng.normal(size=(rows, K))}
    arrays["d"] = arrays["d"].astype(BF16.numpy)
    arrays["d"][arrays["targets"] < 0] = np.nan
    got, want = (run(d, exp_codes.input_gradient, arrays)["d"] for d in (dev, host_device()))
    got, want = (x.astype(np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-12)  # rounded once less, or BF16's
    assert not got[arrays["targets"] < 0].any()


@pytest.mark.parametrize("case", [(16, 96), (272, 304)])
def test_turn(dev, rng, case):
    """All codes that a row can have, factors from 0 to what is clamped, targets everywhere."""
    rows, columns = case
    codes = rng.integers(0, 0x7C, case).astype(np.uint8)
    targets = rng.integers(-1, columns, rows).astype(np.int32)
    counted = np.flatnonzero(targets >= 0)
    codes[counted, targets[counted]] = 0
    factors = np.exp2(rng.uniform(-26, 0, rows)).astype(np.float32)
    factors[::5] = 0
    factors[1] = 9
    arrays = {
        "turned": np.full(case[::-1], np.nan, E5M2.numpy),
        "codes": codes.view(E5M2.numpy),
        "factors": factors,
        "own": -rng.random(rows).astype(np.float32),
        "targets": targets,
    }

    def call(dev, **tensors):
        exp_codes.turn(dev, **tensors, scale=2.0**-15)

    found = compared(dev, call, arrays)["turned"].astype(np.float32)
    assert found.max() == 57344 and found.min() < -20000


def test_traffic_and_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def tensor(dtype, *shape):
        return dev.alloc("t", shape, dtype, "Weights")

    codes, turned, row = tensor(E5M2, 32, 96), tensor(E5M2, 96, 32), tensor(F32, 32)
    targets, x = tensor(I32, 32), tensor(E4M3, 32, 64)
    exp_codes.turn(dev, turned, codes, row, row, targets, 0.5)
    assert sum(dev.bytes.values()) == 2 * codes.nbytes + 3 * row.nbytes
    exp_codes.gather(dev, tensor(I32, 33), x, tensor(I32, 1), x)
    assert sum(dev.bytes.values()) == 2 * codes.nbytes + 3 * row.nbytes + 4  # not x
    with pytest.raises(ValueError, match=r"turn: scale must be a power of two, got 0\.3"):
        exp_codes.turn(dev, turned, codes, row, row, targets, 0.3)
    with pytest.raises(ValueError, match=r"turn: turned must have shape \(96, 32\)"):
        exp_codes.turn(dev, codes, codes, row, row, targets, 0.5)
    with pytest.raises(TypeError, match="gather: x must be F8_E4M3, got BF16"):
        exp_codes.gather(dev, tensor(I32, 33), x, tensor(I32, 1), tensor(BF16, 32, 64))
    with pytest.raises(ValueError, match=r"input_gradient: .*multiples of 16"):
        args = (tensor(BF16, 32, 72), row, row, x, tensor(F32, 1), targets)
        exp_codes.input_gradient(dev, *args)
    with pytest.raises(ValueError, match=r"shift: scale_x must have shape \(1,\)"):
        exp_codes.shift(dev, row, x, x, row, tensor(F32, 1), targets)
    with pytest.raises(ValueError, match=r"finish: masks must have shape \(1,\)"):
        exp_codes.finish(dev, *[row] * 4, targets, row, tensor(F32, 1, 32), row, targets, 0.0)
