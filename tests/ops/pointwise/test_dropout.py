"""Dropout on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.pointwise.elementwise import dropout
from llmq.ref.pointwise.elementwise import DROPOUT_CASES as CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run, step_scalars

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("add", [False, True], ids=["", "add"])
def test_equals_reference(dev, rng, case, dtype, add):
    start = rng.normal(size=case) if add else np.full(case, np.nan)
    arrays = {
        "out": start.astype(dtype.numpy),
        "x": rng.normal(size=case).astype(dtype.numpy),
        # Indices of more than 32 bits.
        "scalars": step_scalars(seed=9, step=4, first_sequence=2**31, sequence_stride=3),
    }

    def call(dev, **tensors):
        dropout(dev, **tensors, probability=0.3, salt=11, sequences=case[0], add=add)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_array_equal(got["out"], want["out"])


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)
    x, words = dev.alloc("x", (4, 8), F32, "Weights"), dev.alloc("s", (16,), I32, "Weights")
    how = {"probability": 0.5, "salt": 0, "sequences": 4}
    with pytest.raises(ValueError, match=r"dropout: probability must be in \[0, 1\), got 1"):
        dropout(dev, x, x, words, **how | {"probability": 1})
    for sequences, message in (
        (8, "per_sequence must be a multiple of 8"),
        (3, "3 sequences"),
    ):
        with pytest.raises(ValueError, match=f"dropout: .*{message}"):
            dropout(dev, x, x, words, **how | {"sequences": sequences})
