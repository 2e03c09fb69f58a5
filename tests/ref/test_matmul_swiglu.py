"""Reference of the up product with the activation behind it, against torch in F64."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, E4M3, F32
from llmq.ref.matmul_swiglu import CASES, matmul_swiglu
from llmq.ref.swiglu import swiglu_forward, swiglu_forward_fp8
from tests.fp8_out import outputs

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def operands_of(rng, M, F, K, R, dtype):
    """The operands of the reference, and what they hold, in F64."""

    def made(dtype, *shape):
        return rng.normal(size=shape).astype(dtype.numpy)

    low = [made(BF16, M, R), made(BF16, 2 * F, R)] if R else [None, None]
    scales = [np.array([s], np.float32) for s in (0.1, 0.7)] if dtype == E4M3 else [None, None]
    return [made(dtype, M, K), made(dtype, 2 * F, K), *low, *scales]


def wide(array):
    return torch.from_numpy(array.astype(np.float64))


@pytest.mark.parametrize("gelu", [0, 1], ids=["silu", "gelu"])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_torch(rng, case, dtype, gelu):
    """up_gate is rounded once, and so is out, of what up_gate holds: half a unit of BF16's last
    place each, beside what F32 sums lose. torch's GELU cancels 1 against a tanh near -1."""
    M, F, K, R = case
    a, b, h, tail, *scales = operands = operands_of(rng, *case, dtype)
    factor = float(scales[0][0]) * float(scales[1][0]) if dtype == E4M3 else 1.0
    want = factor * (wide(a) @ wide(b).T)
    if R:
        want += wide(h) @ wide(tail).T
    up_gate, out = np.full((M, 2 * F), np.nan, BF16.numpy), np.full((M, F), np.nan, BF16.numpy)
    matmul_swiglu(up_gate, out, *operands, M, F, K, gelu=gelu)
    np.testing.assert_allclose(wide(up_gate), want, rtol=2**-8, atol=1e-4)
    up, gate = wide(up_gate).chunk(2, dim=1)
    shared = (
        torch.nn.functional.gelu(gate, approximate="tanh")
        if gelu
        else torch.nn.functional.silu(gate)
    )
    np.testing.assert_allclose(wide(out), up * shared, rtol=2**-8, atol=1e-12)


@pytest.mark.parametrize("layout", [None, "codes", "both"])
def test_what_is_behind_the_product_is_swiglu(rng, layout):
    """All results, and with those that are not wanted left out."""
    M, F, K, _ = case = SMALL["tiles"]
    operands = operands_of(rng, *case, E4M3)

    def empty(columns):
        return np.full((M, columns), np.nan, BF16.numpy)

    up_gate = empty(2 * F)
    matmul_swiglu(up_gate, empty(F), *operands, M, F, K)
    wanted, found = (
        {"out": empty(F), "abs_max": np.zeros(1, F32.numpy)}
        | (outputs((M, F), E4M3, layout, np.float32(0.01)) if layout else {})
        for _ in range(2)
    )
    results = list(wanted.values())[1:]
    if layout:
        swiglu_forward_fp8(wanted["out"], up_gate, M, F, *results, *[None] * 4)  # not from codes
    else:
        swiglu_forward(wanted["out"], up_gate, M, F, *results)
    if layout:
        found["out"] = None
    matmul_swiglu(None, found.pop("out"), *operands, M, F, K, **found)
    for name, array in found.items():
        if array is not None:
            np.testing.assert_array_equal(array.view(np.uint8), wanted[name].view(np.uint8), name)
