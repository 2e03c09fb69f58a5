"""The up product with the activation behind it on a device, against its reference and two kernels.

Operands are small integers, so that sums are exact in any order.
"""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3
from llmq.base.operand import Fp8Out
from llmq.ops import matmul_swiglu, swiglu
from llmq.ops.matmul_adapted import matmul_adapted
from llmq.ref.matmul_swiglu import CASES
from tests.fp8_out import outputs
from tests.harness import run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.fixture
def hopper(dev):
    if dev.spec.capability != matmul_swiglu.CAPABILITY:
        pytest.skip("its instructions are those of compute capability 9.0")
    return dev


def whole(rng, dtype, *shape):
    return rng.integers(-3, 4, shape).astype(np.float32).astype(dtype.numpy)


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
    """Of all kinds; layout: of codes, None: none."""
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


# What follows are sources of their own, which take long to compile for the emulator.
gpu_only = pytest.mark.parametrize(
    "dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@gpu_only
@pytest.mark.parametrize("left_out", [(), ("up_gate",), ("out",)], ids=str)
@pytest.mark.parametrize("layout", ["codes", "transposed", "both"])
def test_all_multiprocessors(hopper, rng, layout, left_out):
    """Several tiles of each cluster, in several groups of columns."""
    M, F, *_ = case = (2064, 4112, 1040, 0)
    arrays = operands_of(rng, *case, E4M3) | results_of(M, F, layout)
    check(hopper, arrays, left_out=left_out)


@gpu_only
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_with_adapters_and_gelu(hopper, rng, dtype):
    M, F, *_ = case = (2064, 4112, 1040, 72)
    arrays = operands_of(rng, *case, dtype) | results_of(M, F, "both")
    check(hopper, arrays, gelu=True)
