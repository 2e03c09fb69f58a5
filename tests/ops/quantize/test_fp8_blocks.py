"""FP8 codes in blocks on a device against their reference: the same bits."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32
from llmq.ops.quantize import fp8_blocks
from llmq.ref.quantize.fp8_blocks import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, compared

SMALL = [shape for name, shape in CASES.items() if "qwen" not in name]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SMALL)
def test_equals_reference(dev, rng, shape, dtype):
    x = (rng.normal(size=shape) * np.exp2(rng.uniform(-9, 9, shape))).astype(dtype.numpy)
    blocks = [-(-size // 128) for size in shape]
    empty = {
        "codes": np.empty(shape, E4M3.numpy),
        "scales": np.empty(blocks[0] * blocks[1], np.float32),
    }
    made = compared(dev, fp8_blocks.encode, empty | {"x": x})
    of_two = {
        "codes": np.stack([made["codes"]] * 2),
        "scales": np.append(made["scales"], made["scales"] * 3),
    }
    compared(dev, fp8_blocks.decode, {"out": np.empty((2, *shape), dtype.numpy), **of_two})


def test_wrong_arguments():
    plan = PlanDevice(GPU_SPEC)
    out, codes = (plan.alloc("x", (1, 8, 24), t, "Weights") for t in (BF16, E4M3))
    with pytest.raises(ValueError, match="fp8_blocks_decode: columns must be a multiple of 16"):
        fp8_blocks.decode(plan, out, codes, plan.alloc("s", (1,), F32, "Weights"))
