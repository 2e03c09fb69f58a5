"""Reference of the matrix product against torch."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, E4M3, E5M2, F32
from llmq.ref.common import decode_fp8
from llmq.ref.product import matmul as ref
from tests.covering import pairwise

CASES = {k: v for k, v in ref.CASES.items() if not k.startswith("qwen")}
CASES |= {"in_pieces": (300, 4096, 8, False, True)}
NO_WORKSPACE = np.empty(0, np.uint8)


def operands(rng, M, N, K, trans_a, trans_b, dtype):
    a = rng.normal(size=(K, M) if trans_a else (M, K)).astype(dtype)
    b = rng.normal(size=(N, K) if trans_b else (K, N)).astype(dtype)
    return a, b, rng.normal(size=N).astype(dtype), rng.normal(size=(M, N)).astype(dtype)


def torch_product(a, b, trans_a, trans_b):
    a, b = (torch.from_numpy(x.astype(np.float64)) for x in (a, b))
    return ((a.T if trans_a else a) @ (b.T if trans_b else b)).numpy()


BOTH = (False, True)


@pytest.mark.parametrize(
    ("case", "with_bias", "added", "dtype", "factors"),
    pairwise(
        case=CASES,
        with_bias=BOTH,
        added=("nothing", "accumulate", "addend"),
        dtype=(np.float64, np.float32, BF16.numpy),
        factors=((1.0, 1.0), (-0.75, 0.5)),
    ),
)
def test_equals_torch(rng, case, with_bias, added, dtype, factors):
    M, N, K, *trans = CASES[case]
    a, b, bias, out = operands(rng, M, N, K, *trans, dtype)
    accumulate, addend = added == "accumulate", out.copy() if added == "addend" else None
    want = factors[0] * torch_product(a, b, *trans)
    want += bias.astype(np.float64) * with_bias + factors[1] * out.astype(np.float64) * accumulate
    if not accumulate:
        out[:] = np.nan
    bias = bias if with_bias else None
    sizes = (M, N, K, *trans, int(accumulate))
    ref.matmul(out, a, b, bias, addend, NO_WORKSPACE, *sizes, *factors)
    if addend is not None:
        want += factors[1] * addend.astype(np.float64)
    # Every partial sum of K products of about 1 (below 4 sqrt(K) <= 48) is rounded, and at the end
    # BF16 results once more.
    epsilon = 2.0**-53 if dtype == np.float64 else 2.0**-24
    rtol = 2.0**-8 if dtype == BF16.numpy else 0
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=rtol, atol=48 * K * epsilon)


def test_f32_out_of_bf16_operands_is_not_rounded(rng):
    a, b, bias, _ = operands(rng, 16, 24, 64, False, True, BF16.numpy)
    out, bias = np.ones((16, 24), np.float32), bias.astype(np.float32)
    ref.matmul(out, a, b, bias, None, NO_WORKSPACE, 16, 24, 64, 0, 1, 1)
    want = torch_product(a, b, False, True) + bias + 1
    np.testing.assert_allclose(out, want, atol=1e-5)  # sums of 64 products of about 1, in F32


FP8_CASES = {k: v for k, v in ref.FP8_CASES.items() if not k.startswith("qwen")}
FP8_CASES |= {"in_pieces": (300, 4096, 16)}


@pytest.mark.parametrize("dtype, torch_dtype", [(E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2")])
def test_every_fp8_code(dtype, torch_dtype):
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    want = torch.from_numpy(codes).view(getattr(torch, torch_dtype)).float().numpy()
    np.testing.assert_array_equal(decode_fp8(codes.view(dtype.numpy)), want)


@pytest.mark.parametrize(
    ("case", "formats", "dtype", "added"),
    pairwise(
        case=FP8_CASES,
        formats=((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)),
        dtype=(F32, BF16),
        added=("nothing", "bias", "accumulate", "addend"),
    ),
    ids=str,
)
def test_fp8_equals_torch(rng, case, formats, dtype, added):
    (a_dtype, b_dtype), bias, accumulate = formats, added == "bias", added == "accumulate"
    M, N, K = FP8_CASES[case]
    a, b = (rng.normal(size=s).astype(d.numpy) for s, d in (((M, K), a_dtype), ((N, K), b_dtype)))
    scale_a, scale_b = (rng.uniform(0.5, 1, 1).astype(np.float32) for _ in range(2))
    b_vector = rng.normal(size=N).astype(BF16.numpy) if bias else None
    out = rng.normal(size=(M, N)).astype(dtype.numpy)
    alpha = 0.22 if added == "addend" else 1.0
    want = alpha * np.float64(scale_a[0]) * scale_b[0] * torch_product(a, b, False, True)
    want += b_vector.astype(np.float64) if bias else 0
    want += out.astype(np.float64) if accumulate else 0
    if not accumulate:
        out[:] = np.nan
    args, sizes = (a, b, scale_a, scale_b, b_vector), (M, N, K, int(accumulate), 0)
    addend = rng.normal(size=(M, N)).astype(dtype.numpy) if added == "addend" else None
    want += 0 if addend is None else addend.astype(np.float64)
    ref.matmul_fp8(out, *args, None, None, addend, NO_WORKSPACE, *sizes, alpha)
    # Partial sums (below 4 sqrt(K) <= 91) are rounded K times, and BF16 results once more.
    rtol = 2.0**-8 if dtype == BF16 else 0
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=rtol, atol=91 * K * 2.0**-24)


@pytest.mark.parametrize("dtype, name", [(E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2")])
def test_fp8_results_are_codes(rng, dtype, name):
    """Those of the product in F32, times the factor, by torch; what is too large is clamped."""
    M, N, K = FP8_CASES["in_pieces"]
    a, b = (rng.normal(size=(n, K)).astype(E4M3.numpy) for n in (M, N))
    one, largest = np.ones(1, np.float32), np.full(1, 1e9, np.float32)
    exact, codes = np.empty((M, N), np.float32), np.empty((M, N), dtype.numpy)
    rest = (None, NO_WORKSPACE, M, N, K, 0, 0)
    ref.matmul_fp8(exact, a, b, one, one, None, None, None, *rest)
    limit = 57344.0 if dtype == E5M2 else 448.0
    factor = np.float32([limit / np.abs(exact).max() * 1.5])
    ref.matmul_fp8(codes, a, b, one, one, None, factor, largest, *rest)
    scaled = torch.from_numpy(exact * factor).clamp(-limit, limit)
    want = scaled.to(getattr(torch, name)).view(torch.uint8).numpy()
    np.testing.assert_array_equal(codes.view(np.uint8), want)
    assert largest == np.abs(exact).max()
    assert (np.abs(codes.astype(np.float32)) == limit).sum() > 1


def test_fast_accumulation_makes_no_difference_to_the_reference(rng):
    a = rng.normal(size=(16, 32)).astype(E4M3.numpy)
    scale, results = np.ones(1, np.float32), np.empty((2, 16, 16), np.float32)
    for fast, out in enumerate(results):
        absent, sizes = (None,) * 4, (16, 16, 32, 0, fast)
        ref.matmul_fp8(out, a, a, scale, scale, *absent, NO_WORKSPACE, *sizes)
    np.testing.assert_array_equal(*results)


def test_block_scales_that_are_one_change_nothing():
    rng = np.random.default_rng(3)
    a, b = (rng.normal(size=(n, 64)).astype(E4M3.numpy) for n in (16, 32))
    start = rng.normal(size=(16, 32)).astype(np.float32)
    scale_a, scale_b = (np.array([x], np.float32) for x in (0.37, 1.9))
    scales, scalars = np.zeros(2 * 512, np.uint8), np.full(8, np.nan, np.float32)
    ref.block_scales(scales, scalars, scale_a, scale_b, 0.22, 1.0, scales.size)
    assert (scales == 127).all() and scalars[4] == 1
    want, got = start.copy(), start.copy()
    rest = (NO_WORKSPACE, 16, 32, 64, 1, 0)
    ref.matmul_fp8(want, a, b, scale_a, scale_b, None, None, None, None, *rest, 0.22)
    ref.matmul_mxfp8(got, a, b, scales, scalars, None, None, *rest)
    np.testing.assert_array_equal(got, want)
