"""Inputs and statistics of heads for multi-token prediction on a device against the references."""

import numpy as np
import pytest

from llmq.ops.loss import mtp
from llmq.ref.loss.mtp import CASES
from tests.harness import compared, host_device, run

SMALL = {name: case for name, case in CASES.items() if case[1] <= 100}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, case, packed):
    tokens, targets = rng.integers(0, 99, (2, *case)).astype(np.int32)
    targets[rng.random(case) < 0.3] = -100
    starts = np.maximum.accumulate(
        np.where(rng.random(case) < 0.2, np.arange(case[1]), 0), axis=1
    ).astype(np.int32)
    given = {"of_tokens": tokens, "of_targets": targets, "starts": starts if packed else None}
    empty = {name: np.full(case, 7, np.int32) for name in ("tokens", "targets")}
    ahead = compared(dev, mtp.shift, empty | given)["targets"].reshape(-1)
    losses, trunk = rng.exponential(2, (2, tokens.size)).astype(np.float32)
    given = {"losses": losses, "trunk": trunk, "targets": ahead}
    given["of_targets"] = np.append(targets, [3, -100, 5]).astype(np.int32)  # of more sequences
    given["stats"] = np.array([1.0, 2.0])
    got, want = (run(each, mtp.stats, given)["stats"] for each in (dev, host_device()))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_no_target_adds_nothing(dev):
    masked = np.full(8, -100, np.int32)
    given = {"losses": np.zeros(8, np.float32), "trunk": np.zeros(8, np.float32)}
    given |= {"targets": masked, "of_targets": masked, "stats": np.array([1.0, 2.0])}
    found = run(dev, mtp.stats, given)["stats"]
    np.testing.assert_array_equal(found, [1, 2])
