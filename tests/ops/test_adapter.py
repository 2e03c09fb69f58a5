"""The matrix of adapters' B on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.adapter import collect, expand
from llmq.ops.common import padded_columns
from llmq.ref.adapter import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype, groups", [(F32, 1), (BF16, 1), (BF16, 3)], ids=str)
def test_equals_reference(dev, rng, case, dtype, groups):
    rows, rank, *edges = case
    spans = [*zip(edges[::2], edges[1::2], strict=True)]
    count = sum(edges[1::2]) - sum(edges[::2])
    b = rng.normal(size=(groups * count, rank)).astype(dtype.numpy)
    whole = np.full((groups * rows, padded_columns(len(spans), rank)), np.nan, dtype.numpy)
    scales = [0.3, -1.7, 0.3, 2.5][: len(spans)]
    how = (spans, scales, groups)
    calls = [
        (lambda dev, whole, b: expand(dev, whole, b, *how), {"whole": whole, "b": b}),
        (
            lambda dev, whole, b: collect(dev, b, whole, *how),
            {
                "whole": rng.normal(size=whole.shape).astype(dtype.numpy),
                "b": np.full_like(b, np.nan),
            },
        ),
    ]
    for call, arrays in calls:
        got, want = run(dev, call, arrays), run(host_device(), call, arrays)
        for name in arrays:
            assert np.isfinite(want[name].astype(np.float32)).all()
            np.testing.assert_array_equal(got[name], want[name])


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(*shape, dtype=F32):
        return dev.alloc("x", shape, dtype, "Weights")

    whole, b = make(8, 8), make(8, 4)
    with pytest.raises(TypeError, match="adapter: whole must be F32 or BF16, got I32"):
        expand(dev, make(8, 8, dtype=I32), b, [(0, 8)], [1.0])
    with pytest.raises(TypeError, match="adapter: b must be F32, got BF16"):
        expand(dev, whole, make(8, 4, dtype=BF16), [(0, 8)], [1.0])
    with pytest.raises(ValueError, match=r"adapter: whole must have shape \(8, 16\)"):
        expand(dev, whole, make(8, 9), [(0, 8)], [1.0])
    for spans in ([(0, 9)], [(4, 8), (0, 4)], [(4, 2)], [(4, 4)]):
        with pytest.raises(ValueError, match="adapter: spans must ascend within 8 rows"):
            collect(dev, b, whole, spans, [1.0] * len(spans))
    with pytest.raises(ValueError, match="adapter: spans must be 1 to 4, got 5"):
        collect(dev, b, whole, [(i, i + 1) for i in range(5)], [1.0] * 5)
