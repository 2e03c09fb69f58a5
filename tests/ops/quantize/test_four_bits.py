"""NF4 on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, U8
from llmq.ops.quantize import four_bits
from llmq.ref.quantize.four_bits import CASES, scale_levels
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import compared, run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_equals_reference(dev, rng, case, dtype):
    (n,) = case
    half, blocks, groups = four_bits.sizes(n)
    x = (rng.normal(size=n) * 0.02).astype(dtype.numpy)
    x[:64] = 0
    made = compared(
        dev,
        four_bits.quantize,
        {
            "codes": np.full(half, 0xFF, np.uint8),
            "scales": np.full(blocks, np.nan, np.float32),
            "x": x,
        },
    )
    mean = np.array([made["scales"].mean()], np.float32)
    kept = compared(
        dev,
        four_bits.quantize_scales,
        {
            "codes": np.full(blocks, 0xFF, np.uint8),
            "groups": np.full(groups, np.nan, np.float32),
            "scales": made["scales"],
            "mean": mean,
            "levels": scale_levels(),
        },
    )
    shared = {
        "codes": made["codes"],
        "scale_codes": kept["codes"],
        "groups": kept["groups"],
        "mean": mean,
        "levels": scale_levels(),
    }
    out = compared(dev, four_bits.decode, {"out": np.full(n, np.nan, dtype.numpy)} | shared)["out"]
    out = out.astype(np.float32)
    scale = {"fp8_scale": np.array([np.abs(out).max() / 448 + 1e-9], np.float32)}
    codes = {"out": np.full(n, np.nan, E4M3.numpy)}
    fp8 = compared(dev, four_bits.decode, codes | shared | scale)["out"].astype(np.float32)
    # E4M3 has 4 significant bits, BF16 8; the smallest number of E4M3 is 2^-9 of a scale.
    np.testing.assert_allclose(fp8 * scale["fp8_scale"], out, rtol=0.07, atol=1e-6)
    # Modules one after the other, with another mean each, are decoded as one by one.
    many = {name: np.concatenate([each, each[::-1]]) for name, each in shared.items()}
    many |= {"mean": np.array([mean[0], 2 * mean[0]], np.float32), "levels": scale_levels()}
    for like in (out.astype(dtype.numpy), codes["out"]):
        how = scale if like.dtype == E4M3.numpy else {}
        empty = {"out": np.full(2 * n, np.nan, like.dtype)}
        both = compared(dev, four_bits.decode, empty | many | how)["out"]
        parts = {name: each[len(each) // 2 :] for name, each in many.items()}
        parts |= {"levels": scale_levels(), "out": empty["out"][n:]}
        one = run(dev, four_bits.decode, parts | how)["out"]
        np.testing.assert_array_equal(both[n:].view(np.uint8), one.view(np.uint8))


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(*shape, dtype=F32):
        return dev.alloc("x", shape, dtype, "Weights")

    with pytest.raises(ValueError, match="nf4_quantize: n must be a multiple of 64, got 32"):
        four_bits.quantize(dev, make(16, dtype=U8), make(0), make(32))
