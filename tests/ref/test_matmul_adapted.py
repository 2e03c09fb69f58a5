"""Reference of the product with adapters in it, against torch in F64."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, E4M3
from llmq.ref.matmul_adapted import CASES, matmul_adapted

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_torch(rng, case, fp8):
    """Rounded once: half a unit of BF16's last place, beside what F32 sums lose."""
    M, N, K, R, transposed = case

    def made(dtype, *shape):
        array = rng.normal(size=shape).astype(dtype.numpy)
        return array, torch.from_numpy(array.astype(np.float64))

    dtype = E4M3 if fp8 else BF16
    (a, a64), (h, h64) = made(dtype, M, K), made(BF16, M, R)
    b, b64 = made(dtype, *((K, N) if transposed and not fp8 else (N, K)))
    tail, tail64 = made(BF16, *((R, N) if transposed else (N, R)))
    scales = [np.array([s], np.float32) for s in (0.3, 0.7)] if fp8 else [None, None]
    factor = float(scales[0][0]) * float(scales[1][0]) if fp8 else 1.0
    right = b64 if transposed and not fp8 else b64.T
    (bias, bias64), (addend, addend64) = made(BF16, N), made(BF16, M, N)
    want = factor * (a64 @ right) + h64 @ (tail64 if transposed else tail64.T)
    want += bias64 + addend64
    out = np.full((M, N), np.nan, BF16.numpy)
    added = (bias, addend)
    matmul_adapted(out, a, b, h, tail, *scales, *added, M, N, K, transposed=int(transposed))
    np.testing.assert_allclose(out.astype(np.float64), want.numpy(), rtol=2**-8, atol=1e-4)


def test_without_adapters(rng):
    a, b = (rng.integers(-3, 4, (16, 32)).astype(BF16.numpy) for _ in range(2))
    out = np.empty((16, 16), np.float32)
    matmul_adapted(out, a, b, *[None] * 6, 16, 16, 32, transposed=0)
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32).T)
