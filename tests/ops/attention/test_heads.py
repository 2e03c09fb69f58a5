"""Moved heads on a device against their reference: every bit."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.attention import heads
from llmq.ops.attention.heads import Place
from llmq.ref.attention.heads import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run

SMALL = {name: case for name, case in CASES.items() if "glm" not in name}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_copies_and_sums_equal_the_reference(dev, rng, case, dtype):
    rows, count, size, step = case
    apart, together = Place(8, count * step + 16, step), Place(0, size, rows * size)
    arrays = {
        "x": rng.normal(size=(rows, apart.row)).astype(dtype.numpy),
        "out": np.full((count, rows, size), np.nan, dtype.numpy),
        "back": rng.normal(size=(rows, apart.row)).astype(dtype.numpy),
        "total": rng.normal(size=(rows, size + 8)).astype(dtype.numpy),
    }

    def call(dev, x, out, back, total):
        sizes = (rows, count, size)
        heads.copy(dev, out, x, *sizes, together, apart)
        heads.copy(dev, back, out, *sizes, apart, together)
        heads.add_up(dev, total, x, *sizes, Place(8, size + 8, 0), apart)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    for name in arrays:
        assert got[name].tobytes() == want[name].tobytes()


def test_wrong_arguments_raise():
    plan = PlanDevice(GPU_SPEC)
    x, out = (plan.alloc("x", (4, 32), F32, "Activations") for _ in "ab")
    whole = Place(0, 32, 16)
    heads.copy(plan, out, x, 4, 2, 16, whole, whole)
    with pytest.raises(ValueError, match="x_first"):
        heads.copy(plan, out, x, 4, 2, 16, whole, Place(8, 32, 16))
    with pytest.raises(ValueError, match="size must be a multiple of 8 on a GPU, got 12"):
        heads.add_up(plan, out, x, 4, 2, 12, whole, whole)
    with pytest.raises(TypeError, match="must be BF16, got F32"):
        heads.copy(plan, out, plan.alloc("y", (4, 32), BF16, "Activations"), 4, 2, 16, whole, whole)
