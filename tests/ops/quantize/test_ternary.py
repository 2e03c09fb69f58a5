"""Ternary weights on a device against their reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.quantize import ternary
from llmq.ref.quantize.ternary import CASES
from tests.harness import host_device, run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_scales_codes_and_values_equal_reference(dev, rng, case, dtype):
    """The matrix has two modules; one has a NaN where the matrix is large enough."""
    rows = case[0]
    modules = (rows - rows // 2, rows // 2)
    w = rng.normal(size=case) * 2.0 ** rng.integers(-3, 3, (rows, 1))
    w[-1, 5] = np.nan if rows > 16 else 0.0
    arrays = {
        "q": np.full(case, 99, np.int8),
        "out": np.zeros(case, dtype.numpy),
        "scale": np.full(rows, -1, np.float32),
        "w": w.astype(dtype.numpy),
        "given": rng.uniform(0.5, 2, rows).astype(np.float32),
    }

    def call(dev, q, out, scale, w, given):
        ternary.scales(dev, scale, w, modules)
        ternary.codes(dev, q, w, given)
        ternary.round_(dev, out, w, given)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    # Sums of rows are F32, in another order.
    np.testing.assert_allclose(got["scale"], want["scale"], rtol=1e-6)
    assert len(np.unique(got["scale"])) == 2
    for name in ("q", "out"):
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
