"""Outliers on a device against their reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.quantize import quantize_int8
from llmq.ref.quantize.quantize_int8 import OUTLIERS_CASES as CASES
from tests.harness import compared

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype, most", [(F32, 16), (BF16, 8)], ids=str)
@pytest.mark.parametrize("large", [0, 3, 12])
def test_equals_reference(dev, rng, case, dtype, most, large):
    rows, cols, outs = case
    x = rng.normal(size=(rows, cols)).astype(dtype.numpy)
    chosen = np.sort(rng.choice(cols, large, replace=False))
    x[1, chosen] = 40 + 4 * np.arange(large)  # no two alike

    def select(dev, mask, index, column_max):
        quantize_int8.select_outliers(dev, mask, index, column_max, 6.0)

    largest = {"column_max": np.full(cols, np.nan, np.float32)}
    largest |= compared(dev, quantize_int8.largest_of_columns, largest | {"x": x})
    largest.pop("x")
    arrays = {"mask": np.full(cols, np.nan, np.float32), "index": np.full(most, 77, np.int32)}
    made = compared(dev, select, arrays | largest)
    found = made["index"][made["index"] >= 0]
    assert len(found) == min(large, most) and set(found) <= set(chosen)
    out = {"out": np.full((rows, most), np.nan, dtype.numpy), "index": made["index"]}
    compared(dev, quantize_int8.take_outliers, out | {"x": x})
    q = rng.integers(-127, 128, (outs, cols)).astype(np.int8)
    codes = {"q": q, "scale": rng.random(outs).astype(np.float32)}
    out["out"] = np.full((outs, most), np.nan, dtype.numpy)
    compared(dev, quantize_int8.outlier_weight, out | codes)
    whole = {"out": np.full((outs, cols), np.nan, dtype.numpy)}
    compared(dev, quantize_int8.decode, whole | codes)
