"""The product of queries, keys and values with RoPE behind it on a device, against its reference
and two kernels.

Operands are small integers, so that sums are exact in any order.
"""

from dataclasses import replace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.ops import rope
from llmq.ops.matmul_adapted import matmul_adapted
from llmq.ops.matmul_rope import matmul_rope, serves
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
    def call(dev, **tensors):
        matmul_rope(dev, **tensors, num_heads=case[2], num_kv_heads=case[3])

    return call


def two(case):
    """The operations that it replaces."""

    def call(dev, *, qkv, a, b, h, tail, scale_a, scale_b, bias, table, starts):
        out = qkv.view(a.shape[0], b.shape[0])
        matmul_adapted(dev, out, a, b, h, tail, scale_a, scale_b, bias=bias)
        rope.forward(dev, qkv, table, *case[2:4], starts=starts)

    return call


def check(dev, arrays, case):
    got = run_exact(dev, one(case), arrays)
    np.testing.assert_array_equal(got["qkv"], run(dev, two(case), arrays)["qkv"])


@pytest.mark.parametrize(
    "case, dtype", [*zip(SMALL.values(), (BF16, E4M3), strict=True)], ids=SMALL
)
def test_equals_reference_and_two_operations(hopper, rng, case, dtype):
    """Clusters whose second block has nothing, tiles with values of one part and queries of the
    next one, and a part of a tile."""
    check(hopper, arrays_of(rng, case, dtype), case)


# What follows are sources of their own, which take long to compile for the emulator.
gpu_only = pytest.mark.parametrize(
    "dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@gpu_only
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("more", [{}, {"bias": False}, {"documents": False}], ids=str)
def test_all_multiprocessors(hopper, rng, dtype, head_dim, more):
    """Several tiles of each cluster, with adapters and without."""
    for R in (0, 48):
        case = (5, 1001, 1024 // head_dim, 512 // head_dim, head_dim, 1040, R)
        check(hopper, arrays_of(rng, case, dtype, **more), case)


@gpu_only
def test_infinities_stay_where_they_are(hopper, rng):
    """A value head is not turned, nor does it touch others."""
    case = SMALL["head_64"]
    arrays = arrays_of(rng, case, BF16)
    arrays["b"][-5] = np.inf
    got, want = (run(hopper, call(case), arrays)["qkv"] for call in (one, two))
    # Sums of infinities of both signs are NaN, which arrays of BF16 take for unequal.
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_where_it_serves():
    dev = PlanDevice(replace(GPU_SPEC, num_sms=132))  # an H100's

    def serves_here(dev=dev, M=32768, N=2048, K=1536, head_dim=128, rank=0, dtype=E4M3, kv=2):
        return serves(dev, dtype, (M, N, K), head_dim, kv, rank)

    assert serves_here() and serves_here(dtype=BF16)
    assert serves_here(N=1152, K=896, head_dim=64)  # Qwen2.5 of 0.5B, 3B, and 7B with adapters
    assert serves_here(M=16384, N=2560, K=2048)
    assert serves_here(M=4096, N=4608, K=3584, rank=48)
    assert serves_here(M=4096, N=4608, K=3584, rank=48, dtype=BF16)
    assert not serves_here(M=2048)  # the second turn is nearly empty
    assert not serves_here(M=1024, N=32768)
    assert not serves_here(head_dim=80) and not serves_here(head_dim=192)
    assert not serves_here(kv=1) and serves_here(kv=1, head_dim=64)
    assert not serves_here(rank=136) and not serves_here(rank=12) and not serves_here(K=1540)
    assert not serves_here(dtype=E5M2) and not serves_here(dtype=F32)
    assert not any(serves_here(other) for other in devices_without())


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def call(dtype=BF16, **changed):
        B, T, Hq, Hkv, Hd, K = 2, 16, 3, 1, 64, 128
        given = {
            "qkv": (BF16, B, T, Hq + 2 * Hkv, Hd),
            "a": (dtype, B * T, K),
            "b": (dtype, (Hq + 2 * Hkv) * Hd, K),
            "h": None,
            "tail": None,
            "bias": None,
            "table": (F32, T, Hd // 2, 2),
        }
        given = {
            name: value and dev.alloc(name, value[1:], value[0], "Activations")
            for name, value in (given | changed).items()
        }
        matmul_rope(dev, **given, num_heads=Hq, num_kv_heads=Hkv)

    call()
    assert dev.flops["matmul_rope"] == 2 * 32 * 320 * 128
    call(bias=(BF16, 320), starts=(I32, 2, 16), h=(BF16, 32, 8), tail=(BF16, 320, 8))
    with pytest.raises(ValueError, match=r"matmul_rope: qkv must have shape \(B, T, 5, Hd\)"):
        call(qkv=(BF16, 2, 16, 4, 64))
    with pytest.raises(TypeError, match="qkv must be BF16, got F32"):
        call(qkv=(F32, 2, 16, 5, 64))
    with pytest.raises(ValueError, match="head size must be 64, 128 or 256, got 80"):
        call(qkv=(BF16, 2, 16, 5, 80))
    with pytest.raises(ValueError, match="of heads of 128 there must be more than one for keys"):
        call(qkv=(BF16, 2, 16, 5, 128), b=(BF16, 640, 128))
    with pytest.raises(ValueError, match=r"a must have shape \(32, K\), got \(16, 128\)"):
        call(a=(BF16, 16, 128))
    with pytest.raises(TypeError, match="a must be F8_E4M3 or BF16, got F8_E5M2"):
        call(E5M2)
    with pytest.raises(TypeError, match="scale_a must be a tensor"):
        call(E4M3)
    with pytest.raises(TypeError, match="only fp8 codes have scales"):
        call(scale_a=(F32, 1))
    with pytest.raises(ValueError, match=r"b must have shape \(320, 128\)"):
        call(b=(BF16, 256, 128))
    with pytest.raises(ValueError, match=r"bias must have shape \(320,\)"):
        call(bias=(BF16, 64))
    with pytest.raises(ValueError, match="table must have at least 16 rows"):
        call(table=(F32, 15, 32, 2))
    with pytest.raises(ValueError, match=r"starts must have shape \(2, 16\)"):
        call(starts=(I32, 32))
    with pytest.raises(ValueError, match=r"tail must have shape \(320, 8\)"):
        call(h=(BF16, 32, 8), tail=(BF16, 8, 320))
