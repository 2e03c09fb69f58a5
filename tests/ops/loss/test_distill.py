"""Distillation on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.common import LogitRows
from llmq.ops.loss import distill
from llmq.ops.loss.distill import Teacher
from llmq.ref.loss.distill import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import compared, host_device, run
from tests.ref.loss.test_distill import teacher_of

SMALL = {name: case for name, case in CASES.items() if case[1] <= 2000}
# The device computes in F32 what the reference does in F64; a BF16 gradient may round otherwise.
GRADIENT = {F32: {"rtol": 2**-12, "atol": 2**-18}, BF16: {"rtol": 2**-7, "atol": 2**-18}}


@pytest.mark.parametrize("how", [(0.0, 1.0, False), (0.25, 2.0, False), (0.25, 1.5, True)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, case, dtype, how):
    rows, vocab, padded, k = case
    logits = rng.normal(size=(rows, padded)) * 2
    logits[:, vocab:] = np.nan
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    logprobs = teacher_of(rng, rows, vocab, k)
    targets[0], targets[-1] = logprobs[0, :1].view(np.int32)[0], -100
    arrays = {"logits": logits.astype(dtype.numpy), "targets": targets, "logprobs": logprobs}
    arrays |= {name: np.full(rows, np.nan, np.float32) for name in ("losses", "lse", "kl")}
    arrays["stats"] = np.ones(9)

    def call(dev, logits, losses, lse, kl, targets, logprobs, stats, gradient=True):
        rows = LogitRows(logits, losses, lse, targets, None, vocab)
        Teacher(logprobs, kl, *how).launch(dev, rows, gradient=gradient)
        distill.add(dev, stats, kl, 7)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_allclose(
        got["logits"].astype(np.float32), want["logits"].astype(np.float32), **GRADIENT[dtype]
    )
    for name in ("losses", "lse", "kl", "stats"):
        np.testing.assert_allclose(got[name], want[name], rtol=2**-14, atol=2**-16)
    assert not got["logits"][:, vocab:].astype(np.float32).any()
    assert not got["logits"][-1].astype(np.float32).any() and got["kl"][-1] == 0
    assert want["stats"][7] == 1 + want["kl"].sum(dtype=np.float64) and want["stats"][6] == 1
    kept = run(dev, lambda dev, **tensors: call(dev, **tensors, gradient=False), arrays)
    assert kept["logits"].tobytes() == arrays["logits"].tobytes()
    np.testing.assert_array_equal(kept["losses"], got["losses"])


@pytest.mark.parametrize("reverse", [False, True])
def test_little_that_is_left_to_other_columns_does_not_cancel(dev, rng, reverse):
    """A model and a teacher are sure of four columns; the last row has no teacher."""
    rows, vocab, k = 6, 300, 4
    left = np.geomspace(1e-2, 1e-7, rows)
    logprobs = teacher_of(rng, rows, vocab, k)
    logprobs[:, k:] = np.log(rng.dirichlet(np.ones(k), rows) * (1 - left[:, None]))
    logits = rng.normal(size=(rows, vocab)) * 2
    for row, ids in enumerate(logprobs[:, :k].view(np.int32)):
        logits[row, ids] += np.log(300 / left[::-1][row])
    logprobs[-1] = 0
    targets = np.append(np.zeros(rows - 1), -100).astype(np.int32)
    arrays = {"logits": logits.astype(np.float32), "targets": targets, "logprobs": logprobs}
    arrays |= {name: np.full(rows, np.nan, np.float32) for name in ("losses", "lse", "kl")}

    def call(dev, logits, losses, lse, kl, targets, logprobs):
        rows = LogitRows(logits, losses, lse, targets, None, vocab)
        Teacher(logprobs, kl, 0.0, 1.0, reverse).launch(dev, rows)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_allclose(got["kl"], want["kl"], rtol=2**-16)
    np.testing.assert_allclose(got["lse"], want["lse"], rtol=2**-20)
    np.testing.assert_allclose(got["logits"], want["logits"], rtol=2**-12, atol=2**-20)


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(*shape, dtype=F32):
        return dev.alloc("x", shape, dtype, "Weights")

    rows = LogitRows(make(2, 32), make(2), make(2), make(2, dtype=I32), None, 16)
    with pytest.raises(ValueError, match="distill: k must be at most 16, got 17"):
        Teacher(make(2, 34), make(2), 0, 1, False).launch(dev, rows)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", [*SMALL.values(), (1, 40, 64, 40)])
def test_the_largest_logits_equal_the_reference(dev, rng, case, dtype):
    """The top k logits in BF16, of which many are equal."""
    rows, vocab, padded, k = case
    logits = rng.normal(size=(rows, padded)).astype(dtype.numpy)
    logits[:, vocab:] = np.nan
    logits[0, : vocab // 2] = 0.5
    arrays = {"logits": logits, "lse": rng.random(rows).astype(np.float32)}
    arrays["top"] = np.full((rows, 2 * k), np.nan, np.float32)

    def call(dev, **tensors):
        distill.top_k(dev, **tensors, vocab_size=vocab)

    found = compared(dev, call, arrays)
    assert (np.diff(found["top"][:, :k].view(np.int32), axis=1) > 0).all()


def test_wrong_arguments_of_top_k():
    dev = PlanDevice(HOST_SPEC)

    def make(*shape, dtype=F32):
        return dev.alloc("x", shape, dtype, "Weights")

    with pytest.raises(ValueError, match="top_k: k must be at most 16, got 17"):
        distill.top_k(dev, make(2, 34), make(2, 32), make(2), 16)
