"""Reference of the product with RoPE behind it: the two references that it stands for."""

import numpy as np

from llmq.base.dtypes import BF16, E4M3
from llmq.ops.rope import make_table
from llmq.ref.matmul_adapted import matmul_adapted
from llmq.ref.matmul_rope import CASES, matmul_rope
from llmq.ref.rope import rope_forward


def test_equals_two(rng):
    B, T, Hq, Hkv, Hd, K, R = (*CASES["head_64"][:-1], 24)
    M, N = B * T, (Hq + 2 * Hkv) * Hd
    a, b = (rng.normal(size=(rows, K)).astype(E4M3.numpy) for rows in (M, N))
    h, tail, bias = (rng.normal(size=shape).astype(BF16.numpy) for shape in ((M, R), (N, R), (N,)))
    scales = [np.array([s], np.float32) for s in (0.3, 0.7)]
    table, starts = make_table(T, Hd, 1e4, None), np.minimum(np.arange(T), 5)
    starts = np.stack([starts, np.zeros_like(starts)]).astype(np.int32)
    got, want = (np.full((B, T, Hq + 2 * Hkv, Hd), np.nan, BF16.numpy) for _ in range(2))
    matmul_rope(got, a, b, h, tail, *scales, bias, table, starts, M, N, K, T, Hq, Hkv)
    out = want.reshape(M, N)
    matmul_adapted(out, a, b, h, tail, *scales, bias, None, M, N, K, transposed=0)
    rope_forward(want, table, M, T, Hq, Hkv, 0, starts)
    np.testing.assert_array_equal(got, want)
