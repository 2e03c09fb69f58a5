"""The matrix of adapters' B, and their norms and magnitudes, on a device against references."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.common import padded_columns
from llmq.ops.product.adapter import collect, expand, magnitude_gradient, norms, scale
from llmq.ref.product.adapter import CASES
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


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_norms_and_magnitudes(dev, rng, case, dtype):
    rows, rank, *edges = case
    spans, K = [*zip(edges[::2], edges[1::2], strict=True)], 300  # more than a block has threads
    w, b = rng.normal(size=(rows, K)), rng.normal(size=(sum(edges[1::2]) - sum(edges[::2]), rank))
    a = rng.normal(size=(padded_columns(len(spans), rank), K))
    arrays = {n: x.astype(dtype.numpy) for n, x in {"w": w, "a": a, "b": b}.items()}
    arrays["out"] = np.full(rows, np.nan, np.float32)
    scales = [0.3, -1.7, 0.3, 2.5][: len(spans)]
    run_norms = partial(norms, spans=spans, scales=scales)
    got, want = (run(d, run_norms, arrays)["out"] for d in (dev, host_device()))
    np.testing.assert_allclose(got, want, rtol=1e-5)  # F32 sums in another order
    assert [row for row in range(rows) if want[row] == 0] == [
        row for row in range(rows) if not any(start <= row < stop for start, stop in spans)
    ]
    x, y = rng.normal(size=(2, 5, rows)).astype(dtype.numpy)
    shared = {"out": np.full_like(x, np.nan), "x": x, "norms": want}
    magnitudes = {"magnitudes": (want * rng.uniform(0.5, 2, rows)).astype(np.float32)}
    bias = {"bias": rng.normal(size=rows).astype(dtype.numpy)}
    for call, more in (
        (scale, magnitudes),
        (scale, magnitudes | bias),
        (magnitude_gradient, {"y": y}),
    ):
        got, want_out = (run(d, call, shared | more)["out"] for d in (dev, host_device()))
        np.testing.assert_array_equal(got, want_out)


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(*shape, dtype=F32):
        return dev.alloc("x", shape, dtype, "Weights")

    whole, b = make(8, 8), make(8, 4)
    for spans in ([(0, 9)], [(4, 8), (0, 4)], [(4, 2)], [(4, 4)]):
        with pytest.raises(ValueError, match="adapter: spans must ascend within 8 rows"):
            collect(dev, b, whole, spans, [1.0] * len(spans))
    with pytest.raises(ValueError, match="adapter: spans must be 1 to 4, got 5"):
        collect(dev, b, whole, [(i, i + 1) for i in range(5)], [1.0] * 5)
