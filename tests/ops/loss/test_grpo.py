"""Losses of samples on a device against their reference."""

from itertools import pairwise

import numpy as np
import pytest

from llmq.base.dtypes import STATS
from llmq.ops.loss import grpo
from llmq.ops.loss.grpo import Samples
from llmq.ref.loss.grpo import CASES, SUMS
from tests.harness import host_device, run
from tests.ref.loss.test_grpo import FORMS

SMALL = {name: case for name, case in CASES.items() if case[1] <= 264}


def sample_arrays(rng, B, T, count):
    """Documents in rows and filler behind them, with masked prompts; the second document of a row
    is all masked. Old log-probabilities are near, some ratios are out of bounds."""
    starts = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    targets = rng.integers(0, 9, (B, T)).astype(np.int32)
    edges = np.linspace(0, T - T // 9, count + 1).astype(int)
    for first, end in pairwise(edges):
        starts[:, first:end] = first
        targets[:, first : first + (end if first == edges[1] else 2)] = -100
    if count:
        targets[:, edges[-1] :] = -100
    losses = np.where(targets < 0, 0, rng.random((B, T)) * 3).astype(np.float32)
    near = rng.normal(size=(3, B, T)).astype(np.float32)
    arrays = {"targets": targets, "losses": losses, "old": near[0] * 0.3 - losses}
    arrays |= {"reference": near[1] * 0.3 - losses, "advantages": near[2]}
    return arrays | {"starts": starts if count else None}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, case, form):
    arrays = sample_arrays(rng, *case)
    shape = arrays["targets"].shape
    if not form.beta:
        arrays["reference"] = None
    out = {"sums": np.zeros((3, *shape), np.float32), "stats": np.ones(len((*STATS, *SUMS)))}
    out |= {"weights": np.full(shape, np.nan, np.float32)}

    def call(dev, sums, weights, stats, **tensors):
        of = Samples(**tensors)
        grpo.sums(dev, sums, of)
        grpo.weights(dev, weights, sums, of, form)
        grpo.stats(dev, stats, sums, of, form)

    got, want = run(dev, call, arrays | out), run(host_device(), call, arrays | out)
    np.testing.assert_allclose(got["sums"], want["sums"], rtol=2**-20, atol=2**-20)
    # Ratios are computed in F32, of log-probabilities that F32 holds.
    np.testing.assert_allclose(got["weights"], want["weights"], rtol=2**-16, atol=2**-20)
    np.testing.assert_allclose(got["stats"], want["stats"], rtol=2**-16)
    masked = arrays["targets"] < 0
    assert want["weights"][~masked].any() and not want["weights"][masked].any()
