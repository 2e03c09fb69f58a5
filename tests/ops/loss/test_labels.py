"""Losses of labels on a device against their reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.common import LogitRows
from llmq.ops.loss.labels import Labels
from llmq.ref.loss.labels import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import close


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", [CASES[name] for name in ("reward", "two", "many")])
def test_equals_reference(dev, rng, case, dtype):
    """With weights and without, with a gradient and without; columns of padding are ignored."""
    rows, vocab, padded, linear = case
    for weighted, gradient in ((True, True), (False, True), (False, False)):
        logits = rng.normal(size=(rows, padded)).astype(dtype.numpy)
        logits[:, vocab:] = np.nan
        targets = rng.integers(0, vocab, rows).astype(np.int32)
        targets[::3] = -100
        logits[1], targets[1] = 0.5, vocab - 1  # the first one of equal ones is the largest
        arrays = {"logits": logits, "targets": targets}
        arrays |= {name: np.full(rows, np.nan, np.float32) for name in ("losses", "lse", "hits")}
        if weighted:
            arrays["weights"] = rng.normal(size=rows).astype(np.float32)

        def call(dev, hits, weights=None, gradient=gradient, **tensors):
            rows = LogitRows(**tensors, weights=weights, vocab_size=vocab)
            Labels(hits, bool(linear)).launch(dev, rows, gradient=gradient)

        # Sums of exponentials in another order; BF16 may then be rounded to the next number.
        names = ("logits", "losses", "lse", "hits")
        close(dev, call, arrays, names, bf16=2**-7, f32=1e-5)


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(*shape, dtype=F32):
        return dev.alloc("x", shape, dtype, "Weights")

    def call(logits, targets, vocab):
        rows = LogitRows(logits, make(2), make(2), targets, None, vocab)
        Labels(make(2), False).launch(dev, rows, gradient=True)

    with pytest.raises(ValueError, match="labels: vocab must be at most 64, got 65"):
        call(make(2, 64), make(2, dtype=I32), 65)
