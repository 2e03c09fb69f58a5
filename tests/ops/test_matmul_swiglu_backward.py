"""The down product's input gradient with the activation's behind it, against both one by one.

Operands of the product are small integers, so that its sums are exact in any order; the same device
computes the activation's gradient of what the reference makes of them, so that all bits are equal.
"""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32
from llmq.base.operand import Fp8Out
from llmq.ops import swiglu
from llmq.ops.matmul_swiglu_backward import backward
from llmq.ops.product import Sizes, taken
from llmq.ref.matmul_adapted import matmul_adapted
from llmq.ref.matmul_swiglu_backward import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, run
from tests.own_products import devices_without, whole

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def operands(rng, case, left):
    """The operands of the product, and up_gate; gates of all sizes, and what is no number in the
    last rows."""
    M, F, K, R = case
    codes = left != BF16
    up_gate = (rng.normal(size=(M, 2 * F)) * 4).astype(BF16.numpy)
    up_gate[0, F:] = np.resize([-200, -90, -88, -87.5, -20, 0, 20, 90, 200, 1], F)
    up_gate[-1, F - 1], up_gate[-2, 2 * F - 1] = np.nan, np.inf
    return {
        "a": whole(rng, left, M, K),
        "b": whole(rng, E4M3 if codes else BF16, *((F, K) if codes else (K, F))),
        "h": whole(rng, BF16, M, R) if R else None,
        "tail": whole(rng, BF16, R, F) if R else None,
        "scale_a": np.array([0.5], np.float32) if codes else None,
        "scale_b": np.array([1 / 64], np.float32) if codes else None,
        "up_gate": up_gate,
    }


def results(case, *, tensor, fp8, layout, out, abs_max=True):
    """Arrays to write to. fp8: the format of codes, or None. out: whether it is written."""
    M, F, _, _ = case
    one = np.zeros(1, np.float32)

    def empty(dtype, *shape):
        filled = np.full(shape, np.nan, np.float32) if dtype == BF16 else np.full(shape, 0.75)
        return filled.astype(dtype.numpy)

    return {
        "d_up_gate": empty(BF16, M, 2 * F) if tensor else None,
        "abs_max": one if abs_max else None,
        "codes": empty(fp8, M, 2 * F) if fp8 and layout != "transposed" else None,
        "transposed": empty(fp8, 2 * F, M) if fp8 and layout != "rows" else None,
        "scale": np.array([1 / 300], np.float32) if fp8 else None,
        "saturated": np.array([7], np.int32) if fp8 else None,
        "out": empty(BF16, M, F) if out else None,
    }


def called(op, dev, *, codes, transposed, scale, saturated, **rest):
    fp8 = None if scale is None else Fp8Out(codes, transposed, scale, saturated)
    op(dev, fp8=fp8, **rest)


def check(dev, rng, case, left=E4M3, *, gelu=False, in_place=False, **wanted):
    given = operands(rng, case, left)
    written = results(case, **wanted)
    if in_place:
        written["d_up_gate"] = None

    def fused(dev, **tensors):
        if in_place:
            tensors["d_up_gate"] = tensors["up_gate"]
        called(partial(backward, gelu=gelu), dev, **tensors)

    got = run(dev, fused, given | written)
    M, F, K, _ = case
    d_out = np.empty((M, F), BF16.numpy)
    product = [given[name] for name in ("a", "b", "h", "tail", "scale_a", "scale_b")]
    matmul_adapted(d_out, *product, None, None, M, F, K, transposed=1)

    def plain(dev, **tensors):
        if in_place:
            tensors["d_up_gate"] = tensors["up_gate"]
        called(partial(swiglu.backward, gelu=gelu), dev, **tensors)

    want = run(dev, plain, {"d_out": d_out, "up_gate": given["up_gate"]} | written)
    for name in [*written, "up_gate"]:
        if want[name] is not None:
            both = got[name].view(np.uint8), want[name].view(np.uint8)
            np.testing.assert_array_equal(*both, err_msg=name)
    return want


def test_codes_in_both_layouts(hopper, rng):
    """Clusters whose second block has nothing, edges of tiles, and more tiles than clusters."""
    for case in SMALL.values():
        want = check(hopper, rng, case, tensor=False, fp8=E4M3, layout="both", out=False)
        assert want["saturated"][0] > 7


# The following are sources of their own, which take long to compile for the emulator.
gpu_only = pytest.mark.parametrize(
    "dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
LARGE = (2064, 4160, 1040, 0)  # several tiles of each cluster, in several groups of columns


@gpu_only
@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_codes_in_one_layout(hopper, rng, layout):
    check(hopper, rng, LARGE, tensor=False, fp8=E4M3, layout=layout, out=False)


@gpu_only
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
def test_bf16(hopper, rng, gelu, in_place):
    options = {"tensor": not in_place, "fp8": None, "layout": None, "out": True}
    check(hopper, rng, LARGE, BF16, gelu=gelu, in_place=in_place, abs_max=False, **options)


@gpu_only
def test_adapters(hopper, rng):
    """With two pairs of tiles of adapters, and d_up_gate besides its codes, in place."""
    case = (*LARGE[:3], 72)
    options = {"tensor": True, "fp8": E4M3, "layout": "rows", "out": True}
    check(hopper, rng, case, in_place=True, **options)


@gpu_only
@pytest.mark.parametrize("gelu", [False, True])
def test_gradients_in_e5m2(hopper, rng, gelu):
    options = {"tensor": True, "fp8": E5M2, "layout": "both", "out": False}
    check(hopper, rng, SMALL["tiles"], E5M2, gelu=gelu, **options)


@gpu_only
def test_scales_just_in_time(hopper, rng):
    """Codes as operands and none as results."""
    options = {"tensor": True, "fp8": None, "layout": None, "out": False}
    check(hopper, rng, SMALL["tiles"], in_place=True, **options)


def test_where_it_serves():
    dev = PlanDevice(GPU_SPEC)

    def serves(dev=dev, M=4096, F=18944, K=3584, dtype=E4M3, rank=0, fast=True):
        return taken(dev, "glu_grad", Sizes(M, F, K, dtype, None, rank), fast=fast)

    assert serves() and serves(dtype=E5M2) and serves(dtype=BF16) and serves(rank=128)
    assert serves(M=32768, F=4864, K=896) and serves(M=32768, F=8960, K=1536)
    assert not serves(M=1024) and not serves(F=2816) and not serves(dtype=F32)
    assert not serves(M=4104) and not serves(F=18960)  # what a warp has of a tile
    assert not serves(rank=136) and not serves(rank=12) and not serves(K=3592)
    assert not serves(fast=False) and serves(dtype=BF16, fast=False)
    assert not any(serves(other) for other in devices_without())


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def tensor(dtype, *shape):
        return dev.alloc("t", shape, dtype, "Weights")

    d_up_gate, up_gate = tensor(BF16, 32, 128), tensor(BF16, 32, 128)
    a, b, h, tail = (tensor(BF16, *n) for n in ((32, 48), (48, 64), (32, 8), (8, 64)))
    one = tensor(F32, 1)
    backward(dev, d_up_gate, a, b, up_gate, h, tail)
    assert dev.flops["matmul_swiglu_backward"] == 2 * 32 * 64 * (48 + 8)
    op = "matmul_swiglu_backward: "
    with pytest.raises(TypeError, match=op + "d_up_gate must be a tensor"):
        backward(dev, None, a, b, up_gate)
    with pytest.raises(ValueError, match=op + r"up_gate must have shape \(32, 128\)"):
        backward(dev, d_up_gate, a, b, tensor(BF16, 32, 64))
    with pytest.raises(ValueError, match=op + r"b must have shape \(48, 64\)"):
        backward(dev, d_up_gate, a, tensor(BF16, 32, 64), up_gate)
    with pytest.raises(
        ValueError, match=op + "M and F must be multiples of 16 and 64, got 32 and 48"
    ):
        backward(dev, d_up_gate, a, tensor(BF16, 48, 48), up_gate)
    with pytest.raises(ValueError, match=op + "a must have 2 dimensions"):
        backward(dev, d_up_gate, one, b, up_gate)
    with pytest.raises(TypeError, match=op + "only fp8 codes have scales"):
        backward(dev, d_up_gate, a, b, up_gate, scale_a=one, scale_b=one)
    with pytest.raises(TypeError, match=op + "a must be BF16 or F8_E4M3 or F8_E5M2, got F32"):
        backward(dev, d_up_gate, tensor(F32, 32, 48), b, up_gate)
    with pytest.raises(ValueError, match=r"h must be .* with R from 1 to 128"):
        backward(dev, d_up_gate, a, b, up_gate, tensor(BF16, 32, 136), tensor(BF16, 136, 64))
    with pytest.raises(ValueError, match=op + r"tail must have shape \(8, 64\)"):
        backward(dev, d_up_gate, a, b, up_gate, h, h)
    codes, right = tensor(E5M2, 32, 48), tensor(E4M3, 64, 48)
    with pytest.raises(TypeError, match=op + "scale_a must be a tensor"):
        backward(dev, d_up_gate, codes, right, up_gate)
    with pytest.raises(TypeError, match=op + "b must be F8_E4M3"):
        backward(dev, d_up_gate, codes, tensor(E5M2, 64, 48), up_gate, None, None, one, one)
    with pytest.raises(TypeError, match=op + "out must be BF16, got F32"):
        backward(dev, d_up_gate, a, b, up_gate, out=tensor(F32, 32, 64))
