"""The up product with the activation behind it on a device, against its reference and two kernels.

Operands are small integers, so that sums are exact in any order.
"""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.operand import Fp8Out, ProductCodes
from llmq.ops import matmul_swiglu, swiglu
from llmq.ops.matmul import matmul_fp8
from llmq.ops.matmul_adapted import matmul_adapted
from llmq.ops.product import Sizes, taken
from llmq.ref.matmul_swiglu import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.fp8_out import outputs
from tests.harness import GPU_SPEC, run
from tests.own_products import devices_without, whole

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def operands_of(rng, M, F, K, R, dtype):
    fp8 = dtype == E4M3
    return {
        "a": whole(rng, dtype, M, K),
        "b": whole(rng, dtype, 2 * F, K),
        "h": whole(rng, BF16, M, R) if R else None,
        "tail": whole(rng, BF16, 2 * F, R) if R else None,
        "scale_a": np.array([0.5], np.float32) if fp8 else None,
        "scale_b": np.array([0.125], np.float32) if fp8 else None,
    }


def results_of(M, F, layout):
    """Results of all kinds; layout: of codes, None: none."""
    found = {
        "up_gate": np.full((M, 2 * F), np.nan, BF16.numpy),
        "out": np.full((M, F), np.nan, BF16.numpy),
        "abs_max": np.zeros(1, np.float32),
    }
    return found | (outputs((M, F), E4M3, layout, np.float32(0.25)) if layout else {})


def fp8_of(codes=None, transposed=None, scale=None, saturated=None):
    return Fp8Out(codes, transposed, scale, saturated) if scale else None


def one(dev, up_gate, out, a, b, h, tail, scale_a, scale_b, abs_max, gelu=False, **codes):
    """The operation."""
    matmul_swiglu.forward(
        dev, up_gate, out, a, b, h, tail, scale_a, scale_b,
        gelu=gelu, abs_max=abs_max, fp8=fp8_of(**codes),
    )  # fmt: skip


def two(dev, up_gate, out, a, b, h, tail, scale_a, scale_b, abs_max, gelu=False, **codes):
    """The operations that it replaces."""
    matmul_adapted(dev, up_gate, a, b, h, tail, scale_a, scale_b)
    swiglu.forward(dev, out, up_gate, gelu=gelu, abs_max=abs_max, fp8=fp8_of(**codes))


def check(dev, arrays, *, gelu=False, left_out=()):
    """The bits of the two operations. left_out: results that are not wanted."""

    def call(operation):
        return lambda dev, **tensors: operation(dev, gelu=gelu, **tensors)

    want = run(dev, call(two), arrays)
    got = run(dev, call(one), arrays | dict.fromkeys(left_out))
    for name in set(arrays) - set(left_out):
        if arrays[name] is not None:
            np.testing.assert_array_equal(got[name].view(np.uint8), want[name].view(np.uint8), name)


@pytest.mark.parametrize("dtype, layout", [(E4M3, "both"), (BF16, None)], ids=str)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_two_operations(hopper, rng, case, dtype, layout):
    """Clusters whose second block has nothing, edges of tiles, and more tiles than clusters."""
    M, F, *_ = case
    check(hopper, operands_of(rng, *case, dtype) | results_of(M, F, layout))


def test_low_gates_and_saturation(hopper, rng):
    """Gates whose sigmoid is no normal number, sums that are saturated, and a NaN."""
    M, F, *_ = case = SMALL["tiles"]
    arrays = operands_of(rng, *case, E4M3) | results_of(M, F, "both")
    arrays["scale_b"][:] = 4
    arrays["a"][-1, 0] = np.nan  # in the last row, of which the first tiles see nothing
    check(hopper, arrays)


def codes_of(M, F, *, scale, abs_max=3.0):
    """Arrays of ProductCodes, as up_..."""
    return {
        "up_codes": np.full((M, 2 * F), 0.75, E4M3.numpy),
        "up_scale": np.array([scale], np.float32),
        "up_factor": np.array([1 / np.float32(scale)], np.float32),
        "up_largest": np.array([1e9], np.float32),
        "up_abs_max": np.array([abs_max], np.float32),
        "up_saturated": np.array([5], np.int32),
        "up_found": np.zeros(4, np.int32),
    }


def product_in(more):
    """ProductCodes, which it takes out of these."""
    names = codes_of(16, 16, scale=1)
    return ProductCodes(**{name.removeprefix("up_"): more.pop(name) for name in names})


def one_with_codes(dev, *, a, b, scale_a, scale_b, gelu, out=None, abs_max=None, **more):
    up = product_in(more)
    matmul_swiglu.forward(
        dev, up, out, a, b, None, None, scale_a, scale_b,
        gelu=gelu, abs_max=abs_max, fp8=fp8_of(**more),
    )  # fmt: skip


def two_with_codes(dev, *, a, b, scale_a, scale_b, gelu, out=None, abs_max=None, **more):
    """The operations that it replaces; the first one alone if nothing is wanted of the second."""
    up = product_in(more)
    matmul_fp8(dev, up, a, b, scale_a, scale_b, fast_accumulation=True)
    fp8 = fp8_of(**more)
    if out is not None or fp8 is not None:
        swiglu.forward(dev, out, up, gelu=gelu, abs_max=abs_max, fp8=fp8)


def check_codes(dev, case, *, scale, abs_max=3.0, nan=False, layout="both", keeps=True, gelu=False):
    """Check as `check` does, with codes as up_gate; layout: None without the activation. keeps:
    up_gate."""
    M, F, *_ = case
    given = operands_of(np.random.default_rng(1), *case, E4M3)
    given["scale_b"][:] = 4
    arrays = {name: x for name, x in given.items() if x is not None}
    arrays |= codes_of(M, F, scale=scale, abs_max=abs_max)
    if nan:
        arrays["a"][-1, 0] = np.nan  # in the last row, of which the first tiles see nothing
    if layout is not None:
        arrays |= outputs((M, F), E4M3, layout, np.float32(0.25))
        arrays["abs_max"] = np.zeros(1, np.float32)
    want = run(dev, lambda dev, **x: two_with_codes(dev, **x, gelu=gelu), arrays)
    left_out = {} if keeps else {"up_codes": None}
    got = run(dev, lambda dev, **x: one_with_codes(dev, **x, gelu=gelu), arrays | left_out)
    for name in arrays.keys() - left_out.keys():
        if arrays[name] is not None:
            both = got[name], want[name]
            if name not in ("up_largest", "up_abs_max"):  # one NaN is as good as another
                both = (x.view(np.uint8) for x in both)
            np.testing.assert_array_equal(*both, name)
    return want


@pytest.mark.parametrize("case", SMALL)
def test_up_gate_as_codes(hopper, case):
    """Also with low gates, and with values that codes cannot be, or only just."""
    case = (*SMALL[case][:3], 0)
    first = check_codes(hopper, case, scale=4.0)
    assert first["up_saturated"][0] == 5
    largest = first["up_abs_max"][0]
    assert largest == first["up_largest"][0] > 3
    few = check_codes(hopper, case, scale=largest / 449)["up_saturated"][0]
    assert 5 < few < 50
    # Codes that are +-MAX, of values that are not beyond it.
    assert check_codes(hopper, case, scale=largest / 440)["up_saturated"][0] == 5
    many = check_codes(hopper, case, scale=largest / 4000, keeps=False)
    assert many["up_saturated"][0] > 200
    check_codes(hopper, case, scale=largest / 400, abs_max=1e9, nan=True)


# The following are sources of their own, which take long to compile for the emulator.
gpu_only = pytest.mark.parametrize(
    "dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@gpu_only
@pytest.mark.parametrize("left_out", [(), ("up_gate",), ("out",)], ids=str)
@pytest.mark.parametrize("layout", ["codes", "transposed", "both"])
def test_all_multiprocessors(hopper, rng, layout, left_out):
    """Several tiles of each cluster, in several groups of columns, of which K makes few."""
    M, F, *_ = case = (2064, 1552, 8208, 0)
    arrays = operands_of(rng, *case, E4M3) | results_of(M, F, layout)
    check(hopper, arrays, left_out=left_out)


@gpu_only
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_with_adapters_and_gelu(hopper, rng, dtype):
    M, F, *_ = case = (2064, 4112, 1040, 72)
    arrays = operands_of(rng, *case, dtype) | results_of(M, F, "both")
    check(hopper, arrays, gelu=True)


@gpu_only
@pytest.mark.parametrize("layout", ["codes", "transposed", "both", None], ids=str)
def test_codes_on_all_multiprocessors(hopper, layout):
    """Also of the product alone, as recomputation has it."""
    for scale in (0.5, 20.0):
        check_codes(hopper, (2064, 1552, 1040, 0), scale=scale, layout=layout, gelu=scale == 0.5)


def test_which_products_it_serves():
    dev = PlanDevice(GPU_SPEC)

    def serves(dev=dev, M=4096, F=18944, K=3584, rank=0, dtype=E4M3, fast=True):
        return taken(dev, "glu", Sizes(M, F, K, dtype, None, rank), fast=fast)

    assert serves() and serves(dtype=BF16) and serves(rank=128) and serves(F=4864, K=896)
    assert not serves(F=4096) and not serves(M=1024) and not serves(rank=136)
    assert not serves(M=4104) and not serves(F=18952)  # codes of both layouts
    assert not serves(rank=12) and not serves(K=3592)  # rows of no multiple of 16 bytes
    assert not serves(dtype=F32) and not serves(dtype=E5M2)
    assert not serves(fast=False) and serves(dtype=BF16, fast=False)
    assert not any(serves(other) for other in devices_without())


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def tensor(dtype, *shape):
        return dev.alloc("t", shape, dtype, "Weights")

    def call(up_gate, out, a, b, *rest, **more):
        matmul_swiglu.forward(dev, up_gate, out, a, b, *rest, **more)

    both = tensor(BF16, 32, 96), tensor(BF16, 32, 48)
    halves = tensor(BF16, 32, 64), tensor(BF16, 96, 64)
    h, tail, one = tensor(BF16, 32, 8), tensor(BF16, 96, 8), tensor(F32, 1)
    codes = tensor(E4M3, 32, 64), tensor(E4M3, 96, 64)
    call(*both, *halves, h, tail)
    assert dev.flops["matmul_swiglu"] == 4 * 32 * 48 * (64 + 8)
    with pytest.raises(TypeError, match="out, fp8 or codes as up_gate must be given"):
        call(both[0], None, *halves)
    with pytest.raises(TypeError, match="up_gate must be BF16, got F32"):
        call(tensor(F32, 32, 96), both[1], *halves)
    with pytest.raises(ValueError, match=r"out must have shape \(32, 48\)"):
        call(both[0], both[0], *halves)
    with pytest.raises(ValueError, match="b must have rows of up and of gate"):
        call(*both, halves[0], tensor(BF16, 95, 64))
    with pytest.raises(ValueError, match="M and F must be multiples of 16, got 32 and 40"):
        call(None, tensor(BF16, 32, 40), halves[0], tensor(BF16, 80, 64))
    with pytest.raises(TypeError, match="b must be BF16, got F8_E4M3"):
        call(*both, halves[0], codes[1])
    with pytest.raises(TypeError, match="a must be F8_E4M3 or BF16, got F8_E5M2"):
        call(*both, tensor(E5M2, 32, 64), codes[1], None, None, one, one)
    with pytest.raises(TypeError, match="scale_a must be a tensor"):
        call(*both, *codes)
    with pytest.raises(TypeError, match="only fp8 codes have scales"):
        call(*both, *halves, None, None, one, one)
    with pytest.raises(ValueError, match=r"h must be .* with R from 1 to 128"):
        call(*both, *halves, tensor(BF16, 32, 136), tensor(BF16, 96, 136))
    with pytest.raises(ValueError, match=r"tail must have shape \(96, 8\)"):
        call(*both, *halves, h, h)
    fp8 = Fp8Out(tensor(E4M3, 48, 32), None, one, tensor(I32, 1))
    with pytest.raises(ValueError, match="codes must have shape"):
        call(*both, *halves, fp8=fp8)
    product = ProductCodes(tensor(E4M3, 32, 96), one, one, one, found=tensor(I32, 4))
    scaled = (*codes, None, None, one, one)
    call(product, None, *scaled)
    with pytest.raises(TypeError, match="out, fp8 or codes as up_gate must be given"):
        call(product._replace(codes=None), None, *scaled)
    for rest in ((*codes, h, tail, one, one), halves):
        with pytest.raises(TypeError, match="codes only of a product of fp8 codes, without h"):
            call(product, None, *rest)
    with pytest.raises(ValueError, match=r"up_gate must have shape \(32, 96\)"):
        call(product._replace(codes=codes[0]), None, *scaled)
    with pytest.raises(TypeError, match=r"up_gate\.found must be a tensor"):
        call(product._replace(found=None), None, *scaled)
    with pytest.raises(ValueError, match="a must be a matrix with rows of a multiple of 16 bytes"):
        call(*both, tensor(BF16, 32, 60), tensor(BF16, 96, 60))
