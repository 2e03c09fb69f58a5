"""The down product's input gradient with the activation's behind it, against both one by one.

Operands of the product are small integers, so that its sums are exact in any order; the same device
computes the activation's gradient of what the reference makes of them, so that all bits are equal.
"""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.operand import Fp8Out
from llmq.ops import swiglu
from llmq.ops.matmul_swiglu_backward import CAPABILITY, backward
from llmq.ref.matmul_adapted import matmul_adapted
from llmq.ref.matmul_swiglu_backward import CASES
from tests.harness import host_device, run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.fixture
def hopper(dev):
    if dev.spec.capability != CAPABILITY:
        pytest.skip("its instructions are those of compute capability 9.0")
    return dev


def whole(rng, dtype, *shape):
    return rng.integers(-3, 4, shape).astype(np.float32).astype(dtype.numpy)


def operands(rng, case, left):
    """Of the product, and up_gate; gates of all sizes, and what is no number in the last rows."""
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
    """Arrays to write to. fp8: the format of codes, or None. out: "tensor", "codes" or None."""
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
        "out": empty(BF16, M, F) if out == "tensor" else None,
        "out_transposed": empty(E4M3, F, M) if out == "codes" else None,
        "out_scale": np.array([1 / 60], np.float32) if out == "codes" else None,
        "out_saturated": np.array([1], np.int32) if out == "codes" else None,
    }


def called(op, dev, *, codes, transposed, scale, saturated, out_transposed, out_scale,
           out_saturated, **rest):  # fmt: skip
    fp8 = None if scale is None else Fp8Out(codes, transposed, scale, saturated)
    again = None
    if out_scale is not None:
        again = Fp8Out(None, out_transposed, out_scale, out_saturated)
    op(dev, fp8=fp8, out_fp8=again, **rest)


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
    matmul_adapted(d_out, *product, M, F, K, transposed=1)

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
        want = check(hopper, rng, case, tensor=False, fp8=E4M3, layout="both", out=None)
        assert want["saturated"][0] > 7
