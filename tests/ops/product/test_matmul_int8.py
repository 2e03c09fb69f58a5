"""The product of signed bytes on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I8
from llmq.ops.product import matmul as op
from llmq.ops.product.matmul import INT8_TILES as TILES
from llmq.ops.product.matmul import MOST_TERMS, matmul_int8, tiles_of
from llmq.ref.product.matmul import INT8_CASES as CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def operands(rng, M, N, K, dtype, bias=False):
    return {
        "out": rng.normal(size=(M, N)).astype(dtype.numpy),
        "a": rng.integers(-127, 128, (M, K), np.int8),
        "b": rng.integers(-127, 128, (N, K), np.int8),
        "scale_a": rng.uniform(0.5, 2.0, M).astype(np.float32),
        "scale_b": rng.uniform(0.5, 2.0, N).astype(np.float32),
        "bias": rng.normal(size=N).astype(BF16.numpy) if bias else None,
    }


def check(dev, arrays, **options):
    def call(dev, **tensors):
        matmul_int8(dev, **tensors, **options)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    got, want = (
        result["out"].astype(np.float32) for result in (got, want)
    )  # NumPy knows their NaN
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize(
    ("dtype", "how"),
    [(BF16, "bias"), (BF16, ""), (BF16, "alpha"), (F32, "accumulate")],
    ids=str,
)
def test_equals_reference(dev, rng, case, dtype, how):
    arrays = operands(rng, *case, dtype, how == "bias")
    check(dev, arrays, accumulate=how == "accumulate", alpha=0.22 if how == "alpha" else 1.0)


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_all_tiles(dev, rng, tiles, monkeypatch):
    """Several of them in both directions, whole ones and parts."""
    monkeypatch.setattr(op, "INT8_TILES", (tiles,))
    rows, columns = tiles.shape
    check(dev, operands(rng, rows + 48, columns + 16, 208, BF16))


def test_a_scale_that_is_nan_stays_in_its_row(dev, rng):
    arrays = operands(rng, 32, 32, 64, BF16)
    arrays["scale_a"][3], arrays["scale_b"][17] = np.nan, np.nan
    check(dev, arrays)


def test_tiles():
    assert tiles_of(32768, 9728, 132) == TILES[0]
    assert tiles_of(1536, 1536, 132) == TILES[1]
    assert tiles_of(64, 64, 132) == TILES[-1]
    assert [tiles.shape for tiles in TILES] == [(256, 128), (128, 128), (64, 64)]
    assert max(tiles.shared_bytes for tiles in TILES) <= 99 * 1024  # of a block on GA10x and Ada


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def tensor(dtype, *shape):
        return dev.alloc("t", shape, dtype, "Weights")

    out, a, b = tensor(BF16, 32, 48), tensor(I8, 32, 64), tensor(I8, 48, 64)
    rows, columns = tensor(F32, 32), tensor(F32, 48)
    matmul_int8(dev, out, a, b, rows, columns)
    with pytest.raises(ValueError, match="N must be a multiple of 16, got 40"):
        matmul_int8(dev, tensor(BF16, 32, 40), a, tensor(I8, 40, 64), rows, tensor(F32, 40))
    with pytest.raises(TypeError, match="out must be F32 with accumulate, got BF16"):
        matmul_int8(dev, out, a, b, rows, columns, accumulate=True)
    K = MOST_TERMS // 16 * 16 + 16
    with pytest.raises(ValueError, match="K must be at most 133144, got 133152"):
        matmul_int8(dev, out, tensor(I8, 32, K), tensor(I8, 48, K), rows, columns)
