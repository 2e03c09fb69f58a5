"""MXFP4 on a device against its reference: the same bits."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.quantize import four_bits
from llmq.ref.quantize.four_bits import MXFP4_CASES as CASES
from tests.harness import compared

SMALL = [n for name, (n,) in CASES.items() if "gpt_oss" not in name]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", SMALL)
def test_equals_reference(dev, rng, n, dtype):
    of_blocks = np.repeat(np.exp2(rng.uniform(-9, 9, n // 32)), 32)
    x = (rng.normal(size=n) * of_blocks).astype(dtype.numpy)
    x[:4], x[4:32] = [0, -0.0, 6, 5], 0
    if n > 32:
        x[32:64] = 0
    codes, exponents = np.empty(n // 2, np.uint8), np.empty(n // 32, np.uint8)
    made = compared(dev, four_bits.encode_mxfp4, {"codes": codes, "exponents": exponents, "x": x})
    out = np.full(n, np.nan, dtype.numpy)
    given = {"out": out, "codes": made["codes"], "exponents": made["exponents"]}
    got = compared(dev, four_bits.decode_mxfp4, given)["out"]
    np.testing.assert_array_equal(got[:4].astype(np.float32), [0, 0, 6, 4])
