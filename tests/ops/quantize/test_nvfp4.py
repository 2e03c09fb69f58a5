"""NVFP4 on a device against its reference: the same bits."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, U8
from llmq.ops.quantize import nvfp4
from llmq.ref.quantize.nvfp4 import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, compared

SMALL = [n for name, (n,) in CASES.items() if "qwen" not in name]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", SMALL)
def test_equals_reference(dev, rng, n, dtype):
    of_blocks = np.repeat(np.exp2(rng.uniform(-16, 0, n // 16)), 16)
    x = (rng.normal(size=n) * of_blocks).astype(dtype.numpy)
    if n > 16:
        x[16:32] = 0
    empty = {
        "codes": np.empty(n // 2, np.uint8),
        "scales": np.empty(n // 16, E4M3.numpy),
        "factor": np.empty(1, np.float32),
    }
    largest = np.abs(x).max(keepdims=True).astype(np.float32)
    made = compared(dev, nvfp4.encode, empty | {"x": x, "abs_max": largest})
    out = np.full(n, np.nan, dtype.numpy)
    given = {"out": out, "codes": made["codes"], "scales": made["scales"]}
    got = compared(dev, nvfp4.decode, given | {"factors": made["factor"]})["out"]
    assert np.abs(got.astype(np.float32) - x.astype(np.float32)).max() < largest[0] / 5


def test_modules_have_factors_of_their_own(dev, rng):
    codes = rng.integers(0, 256, 3 * 24, np.uint8)
    scales = rng.integers(1, 120, 9, np.uint8).view(E4M3.numpy)
    factors = np.array([1, 0.001, 3], np.float32)
    out = np.full(3 * 48, np.nan, np.float32)
    compared(dev, nvfp4.decode, {"out": out, "codes": codes, "scales": scales, "factors": factors})


def test_wrong_arguments():
    plan = PlanDevice(GPU_SPEC)
    out = plan.alloc("out", (64,), BF16, "Weights")
    codes, scales = plan.alloc("c", (32,), U8, "Weights"), plan.alloc("s", (5,), E4M3, "Weights")
    with pytest.raises(ValueError, match=r"nvfp4_decode: scales must have shape \(4,\)"):
        nvfp4.decode(plan, out, codes, scales, plan.alloc("f", (1,), F32, "Weights"))
