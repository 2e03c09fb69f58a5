"""The product of queries, keys and values with RoPE behind it on a device, against its reference and
two kernels.

Operands are small integers, so that sums are exact in any order.
"""

from dataclasses import replace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.ops import rope
from llmq.ops.matmul_adapted import matmul_adapted
from llmq.ops.matmul_rope import MATMUL_ROPE, matmul_rope, serves
from llmq.ref.matmul_rope import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.exact import run_exact
from tests.harness import GPU_SPEC, run
from tests.own_products import devices_without, whole

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def arrays_of(rng, case, dtype, *, bias=True, documents=True):
    B, T, Hq, Hkv, Hd, K, R = case
    M, N, fp8 = B * T, (Hq + 2 * Hkv) * Hd, dtype == E4M3
    starts = np.sort(rng.integers(0, T, (B, T)), axis=1)
    return {
        "qkv": np.full((B, T, Hq + 2 * Hkv, Hd), np.nan, BF16.numpy),
        "a": whole(rng, dtype, M, K),
        "b": whole(rng, dtype, N, K),
        "h": whole(rng, BF16, M, R) if R else None,
        "tail": whole(rng, BF16, N, R) if R else None,
        "scale_a": np.array([0.5], np.float32) if fp8 else None,
        "scale_b": np.array([0.125], np.float32) if fp8 else None,
        "bias": whole(rng, BF16, N) if bias else None,
        "table": rope.make_table(T + 3, Hd, 1e4, None),
        "starts": np.minimum(starts, np.arange(T)).astype(np.int32) if documents else None,
    }


def one(case):
    def call(dev, *, bias, table, starts, **product):
        heads = {"num_heads": case[2], "num_kv_heads": case[3]}
        matmul_rope(dev, **product, bias=bias, table=table, starts=starts, **heads)

    return call


def two(case):
    """The operations that it replaces."""

    def call(dev, *, qkv, a, b, h, tail, scale_a, scale_b, bias, table, starts):
        out = qkv.view(a.shape[0], b.shape[0])
        matmul_adapted(dev, out, a, b, h, tail, scale_a, scale_b, bias=bias)
        rope.forward(dev, qkv, table, *case[2:4], starts=starts)

    return call


@pytest.mark.parametrize("case, dtype", zip(SMALL.values(), (BF16, E4M3), strict=True), ids=SMALL)
def test_equals_reference(hopper, rng, case, dtype):
    """Clusters whose second block has nothing, tiles with parts of heads, and half of a tile."""
    arrays = arrays_of(rng, case, dtype)
    got = run_exact(hopper, one(case), arrays)
    want = run(hopper, two(case), arrays)
    np.testing.assert_array_equal(got["qkv"], want["qkv"])
