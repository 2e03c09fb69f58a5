"""The product with adapters in it on a device against its reference.

Operands are small integers, so that sums are exact in any order.
"""

from dataclasses import replace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32
from llmq.ops.matmul_adapted import matmul_adapted, tile_columns
from llmq.ops.product import Sizes, taken
from llmq.ref.matmul_adapted import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, compared
from tests.own_products import devices_without, whole

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def arrays_of(rng, case, a, b):
    M, N, K, R, transposed = case
    fp8 = a != BF16
    return {
        "out": np.full((M, N), np.nan, BF16.numpy),
        "a": whole(rng, a, M, K),
        "b": whole(rng, b, *((K, N) if transposed and not fp8 else (N, K))),
        "h": whole(rng, BF16, M, R) if R else None,
        "tail": whole(rng, BF16, *((R, N) if transposed else (N, R))) if R else None,
        "scale_a": np.array([0.5], np.float32) if fp8 else None,
        "scale_b": np.array([4.0], np.float32) if fp8 else None,
        "bias": None if transposed else whole(rng, BF16, N),
        "addend": None if transposed else whole(rng, BF16, M, N),
    }


def check(dev, arrays, transposed):
    def call(dev, out, a, b, **rest):
        given = {"h": None, "tail": None} | rest
        matmul_adapted(dev, out, a, b, **given, transposed=transposed)

    compared(dev, call, {name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_equals_reference(hopper, rng, case, dtype):
    """Clusters whose second block has nothing, edges of tiles, and more tiles than clusters."""
    check(hopper, arrays_of(rng, case, dtype, dtype), case[-1])


@pytest.fixture
def wide(monkeypatch):
    """All tiles have 224 columns."""
    monkeypatch.setattr("llmq.ops.matmul_adapted.tile_columns", lambda *args: 224)


def test_wide_tiles(hopper, rng, wide):
    """The last 64 columns begin in those before; several turns of the emulator's cluster."""
    check(hopper, arrays_of(rng, (272, 712, 208, 72, True), BF16, BF16), True)


# The following are sources of their own, which take long to compile for the emulator.
gpu_only = pytest.mark.parametrize(
    "dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@gpu_only
@pytest.mark.parametrize("dtypes", [(E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_gradients_in_e5m2(hopper, rng, dtypes):
    check(hopper, arrays_of(rng, SMALL["tiles_transposed"], *dtypes), True)


@gpu_only
@pytest.mark.parametrize("added", ["bias", "addend"])
def test_one_is_added(hopper, rng, added):
    """The stream has an addend and mostly no bias, gradients of others have neither."""
    for dtype in (BF16, E4M3):
        arrays = arrays_of(rng, (2064, 3088, 400, 40, False), dtype, dtype)
        check(hopper, arrays | {added: None}, False)


@gpu_only
def test_without_adapters(hopper, rng):
    """Products without adapters are what is computed again: the up product, and gradients before
    the activation's."""
    check(hopper, arrays_of(rng, (304, 208, 144, 0, False), E4M3, E4M3), False)
    for dtype in (E4M3, E5M2):
        check(hopper, arrays_of(rng, (304, 208, 144, 0, True), dtype, E4M3), True)


@gpu_only
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_all_multiprocessors(hopper, rng, dtype, transposed):
    """Several tiles of each cluster, in several groups of columns, of which K makes few."""
    check(hopper, arrays_of(rng, (2064, 3088, 8208, 40, transposed), dtype, dtype), transposed)


@gpu_only
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_all_multiprocessors_with_wide_tiles(hopper, rng, wide, dtype, transposed):
    arrays = arrays_of(rng, (2064, 3088, 8208, 40, transposed), dtype, dtype)
    check(hopper, arrays, transposed)


@gpu_only
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_wide_tiles_with_bias_and_addend(hopper, rng, wide, dtype):
    check(hopper, arrays_of(rng, (304, 712, 208, 72, False), dtype, dtype), False)


def test_where_tiles_are_wide():
    """7B's 3,584 columns make 3.9 turns of wide tiles and 4.6 of narrow ones."""
    dev = PlanDevice(replace(GPU_SPEC, num_sms=132))  # an H100's
    assert tile_columns(dev, 4096, 3584, 2 * 18944) == tile_columns(dev, 4096, 3584, 18944) == 224
    assert tile_columns(dev, 4096, 3584, 2 * 4608) == 224
    assert tile_columns(dev, 4096, 3584, 4608) == 192  # tiles are multiplied as quickly as stored
    assert tile_columns(dev, 4096, 4608, 2 * 3584) == 192  # 5.8 turns


def test_where_it_is_faster():
    dev = PlanDevice(replace(GPU_SPEC, num_sms=132))  # an H100's

    def faster(dev=dev, M=4096, N=18944, K=3584, R=32, dtype=BF16, out=BF16, fast=True):
        return taken(dev, "adapters", Sizes(M, N, K, dtype, out, R), fast=fast)

    assert faster() and faster(dtype=E4M3) and faster(R=128)
    assert not faster(M=1024) and not faster(R=136)
    assert not faster(R=12) and not faster(K=3592, dtype=E4M3)  # rows of no multiple of 16 bytes
    # An idle last turn costs less than is saved, if little of it is idle, or K is short.
    assert faster(N=3584) and faster(N=3584, K=37888) and faster(N=3584, K=37888, dtype=E4M3)
    assert faster(N=3584, M=3584) and not faster(N=3584, M=3584, K=18944)
    assert not faster(N=512) and faster(N=512, M=16384)  # the first turn is not full
    assert not faster(dtype=F32) and not faster(out=F32)
    assert not faster(dtype=E4M3, fast=False) and faster(fast=False)
    assert not any(faster(other) for other in devices_without())


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def tensor(dtype, *shape):
        return dev.alloc("t", shape, dtype, "Weights")

    out, a, b, one = (
        tensor(BF16, 32, 48),
        tensor(BF16, 32, 64),
        tensor(BF16, 48, 64),
        tensor(F32, 1),
    )
    h, tail = tensor(BF16, 32, 8), tensor(BF16, 48, 8)
    matmul_adapted(dev, out, a, b, h, tail)
    assert dev.flops["matmul_adapted"] == 2 * 32 * 48 * (64 + 8)
    with pytest.raises(TypeError, match="matmul_adapted: out must be BF16, got F32"):
        matmul_adapted(dev, tensor(F32, 32, 48), a, b, h, tail)
    with pytest.raises(ValueError, match=r"matmul_adapted: b must have shape \(64, 48\)"):
        matmul_adapted(dev, out, a, b, h, tail, transposed=True)
    with pytest.raises(ValueError, match=r"matmul_adapted: tail must have shape \(48, 8\)"):
        matmul_adapted(dev, out, a, b, h, h)
    with pytest.raises(ValueError, match=r"h must be .* with R from 1 to 128"):
        matmul_adapted(dev, out, a, b, tensor(BF16, 32, 136), tail)
    with pytest.raises(ValueError, match=r"bias must have shape \(48,\)"):
        matmul_adapted(dev, out, a, b, h, tail, bias=tensor(BF16, 32))
    with pytest.raises(ValueError, match=r"addend must have shape \(32, 48\)"):
        matmul_adapted(dev, out, a, b, h, tail, addend=tail)
    with pytest.raises(TypeError, match="only fp8 codes have scales"):
        matmul_adapted(dev, out, a, b, h, tail, one, one)
    codes = tensor(E5M2, 32, 64), tensor(E5M2, 48, 64)
    with pytest.raises(TypeError, match="a or b must be F8_E4M3, both are F8_E5M2"):
        matmul_adapted(dev, out, *codes, h, tail, one, one)
    with pytest.raises(TypeError, match="scale_a must be a tensor"):
        matmul_adapted(dev, out, codes[0], tensor(E4M3, 48, 64), h, tail)
    with pytest.raises(ValueError, match="a must be a matrix with rows of a multiple of 16 bytes"):
        matmul_adapted(dev, out, tensor(BF16, 32, 60), tensor(BF16, 48, 60), h, tail)
