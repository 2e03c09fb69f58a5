"""Reference of the product of signed bytes, against integers."""

import numpy as np

from llmq.ref.product.matmul import INT8_CASES as CASES
from llmq.ref.product.matmul import matmul_int8

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def test_sums_are_exact(rng):
    """Also where F32 could not hold them: codes of the largest values, summed over 2100."""
    for M, N, K in [*SMALL.values(), (16, 16, 2100)]:
        a, b = (rng.integers(-127, 128, (n, K), np.int8) for n in (M, N))
        a[0], b[0], b[1] = 127, 127, -127
        scale_a, scale_b = (2.0 ** rng.integers(-9, 9, n).astype(np.float32) for n in (M, N))
        out = np.empty((M, N), np.float64)
        matmul_int8(out, a, b, scale_a, scale_b, None, M, N, K, 0.5, accumulate=0)
        sums = a.astype(np.int64) @ b.astype(np.int64).T
        want = sums.astype(np.float32).astype(np.float64) * scale_a[:, None] * scale_b / 2
        np.testing.assert_array_equal(out, want)  # powers of two change nothing


def test_bias_and_accumulation(rng):
    a, b = (rng.integers(-127, 128, (16, 32), np.int8) for _ in range(2))
    one, bias = np.ones(16, np.float32), rng.integers(-9, 9, 16).astype(np.float32)
    product, added = np.empty((16, 16), np.float32), np.empty((16, 16), np.float32)
    matmul_int8(product, a, b, one, one, None, 16, 16, 32, 1.0, accumulate=0)
    matmul_int8(added, a, b, one, one, bias, 16, 16, 32, 1.0, accumulate=0)
    np.testing.assert_array_equal(added, product + bias)
    matmul_int8(added, a, b, one, one, None, 16, 16, 32, 1.0, accumulate=1)
    np.testing.assert_array_equal(added, 2 * product + bias)
