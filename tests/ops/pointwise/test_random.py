"""Normal random numbers on a device against their reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.pointwise import elementwise
from llmq.ref.pointwise.elementwise import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}
SEED = 0xFEDCBA9876543210


def normal(dev, shape, dtype, std=0.02, seed=SEED, first_index=0):
    def call(dev, out):
        elementwise.normal(dev, out, std, seed, first_index)

    return run(dev, call, {"out": np.full(shape, np.nan, dtype.numpy)})["out"]


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("first_index", [0, 5, 2**33 + 2])
def test_f32(dev, shape, first_index):
    got = normal(dev, shape, F32, first_index=first_index)
    want = normal(host_device(), shape, F32, first_index=first_index)
    # logf, sqrtf, the angle's functions and two products: each a rounding or two apart.
    np.testing.assert_allclose(got, want, rtol=6 * 2**-23)


def test_bf16(dev):
    got = normal(dev, (1003,), BF16).astype(np.float32)
    want = normal(host_device(), (1003,), BF16).astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-7)  # the next BF16 number at a rounding edge
    assert (got == want).mean() > 0.99


def test_a_piece_equals_the_whole(dev):
    whole = normal(dev, (300,), F32)
    np.testing.assert_array_equal(normal(dev, (101,), F32, first_index=7), whole[7:108])


def test_both_halves_of_the_seed_count(dev):
    first = normal(dev, (64,), F32)
    for seed in (SEED ^ 1, SEED ^ 1 << 63):
        assert not np.isin(normal(dev, (64,), F32, seed=seed), first).any()


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)
    with pytest.raises(ValueError, match="random_normal: first_index must be at least 0, got -1"):
        elementwise.normal(dev, dev.alloc("out", (4,), F32, "Weights"), 1.0, 0, -1)
