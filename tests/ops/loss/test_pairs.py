"""Losses of pairs on a device against their reference."""

import numpy as np
import pytest

from llmq.base.dtypes import F32, I32, STATS
from llmq.ops.loss import pairs
from llmq.ops.loss.pairs import Places
from llmq.ref.loss.pairs import CASES, IPO, KTO, ORPO, SIGMOID, SUMS, Form
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run

SMALL = {name: case for name, case in CASES.items() if case[1] <= 264}
FORMS = {
    "dpo": Form(SIGMOID, 0, 0.1, 0.0, 0.2, 0.3),
    "simpo": Form(SIGMOID, 1, 2.0, 0.5, 0.0, 0.0),
    "ipo": Form(IPO, 1, 0.1, 0.0, 0.0, 0.5),
    "orpo": Form(ORPO, 0, 0.2, 0.0, 0.0, 1.0),
    "kto": Form(KTO, 0, 0.1, 1.0, 0.0, 2.0),
}


def pair_arrays(rng, B, T, count):
    """Pairs of documents in each row, and padding; the second pair of a row is masked in one of its
    documents, the third prefers its second one."""
    starts, partner = np.tile(np.arange(T, dtype=np.int32), (B, 1)), np.zeros((B, T), np.float32)
    for b in range(B):
        edges = np.sort(rng.choice(np.arange(1, T), 2 * count - 1, replace=False))
        edges = [0, *edges.tolist(), T - T // 9]
        edges = np.maximum.accumulate(edges)
        for k in range(count):
            one, two, end = (int(e) for e in edges[2 * k : 2 * k + 3])
            if not one < two < end:
                continue
            sign = -1 if k % 3 == 2 else 1
            starts[b, one:two], starts[b, two:end] = one, two
            partner[b, one:two], partner[b, two:end] = sign * (two + 1), -sign * (one + 1)
    targets = rng.integers(0, 9, (B, T)).astype(np.int32)
    targets[rng.random((B, T)) < 0.3] = -100
    if count > 1:
        targets[(starts == np.abs(partner[:, :1]) - 1) & (partner != 0)] = -100
    losses = np.where(targets < 0, 0, rng.random((B, T)) * 3).astype(np.float32)
    reference = (-rng.random((B, T)) * 3).astype(np.float32)
    return {"targets": targets, "losses": losses, "reference": reference}, (starts, partner)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, case, form):
    B, T, count = case
    arrays, (starts, partner) = pair_arrays(rng, B, T, count)
    if form.kind == ORPO:
        arrays["reference"] = None
    shape = {
        "sums": np.zeros((3, B, T), np.float32),
        "weights": np.full((B, T), np.nan, np.float32),
    }
    shape |= {"shift": np.full(1, np.nan, np.float32), "stats": np.ones(len((*STATS, *SUMS)))}
    shape |= {"gained": np.array([[np.nan, np.nan], [9.0, 2.0]])}  # of this rank and of another one

    def call(dev, sums, weights, shift, stats, gained, targets, losses, reference, starts, partner):
        places = Places(starts, partner)
        pairs.sums(dev, sums, targets, losses, reference, places)
        pairs.gains(dev, gained.rows(0, 1).view(2), sums, places)
        pairs.shift(dev, shift, gained)
        given = shift if form.kind == KTO else None
        pairs.weights(dev, weights, sums, given, targets, places, form)
        pairs.stats(dev, stats, sums, given, places, form)

    arrays |= shape | {"starts": starts, "partner": partner}
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    # Sums are of F64 in another order, rounded once; weights and losses are computed in F32.
    np.testing.assert_allclose(got["sums"], want["sums"], rtol=2**-22)
    np.testing.assert_allclose(got["gained"], want["gained"], rtol=2**-22)
    np.testing.assert_allclose(got["shift"], want["shift"], rtol=2**-20)
    np.testing.assert_allclose(got["weights"], want["weights"], rtol=2**-14, atol=2**-22)
    np.testing.assert_allclose(got["stats"], want["stats"], rtol=2**-16)
    assert (want["weights"] != 0).any() and not want["weights"][partner == 0].any()
    assert not want["weights"][arrays["targets"] < 0].any()


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(*shape, dtype=F32):
        return dev.alloc("x", shape, dtype, "Weights")

    places = Places(make(2, 8, dtype=I32), make(2, 8))
    with pytest.raises(ValueError, match=r"pairs.weights: shift is for KTO, and needed there"):
        form = FORMS["kto"]
        targets = make(2, 8, dtype=I32)
        pairs.weights(dev, make(2, 8), make(3, 2, 8), None, targets, places, form)
