"""References of rmsnorm against torch."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16
from llmq.ref import rmsnorm as ref
from tests.harness import step_scalars

EPS = 1e-5


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What transformers' Qwen2RMSNorm and LlamaRMSNorm compute."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def test_forward_equals_torch(rng):
    x, weight = rng.normal(size=(7, 72)), rng.normal(size=72)
    out, rstd = np.full((7, 72), np.nan), np.full(7, np.nan)
    ref.rmsnorm_forward(out, rstd, x, weight, EPS, 7, 72)
    want = torch_norm(torch.tensor(x), torch.tensor(weight))
    # F64 on both sides: a few roundings in another order.
    np.testing.assert_allclose(out, want.numpy(), rtol=1e-13)
    np.testing.assert_allclose(rstd, 1 / np.sqrt((x * x).mean(1) + EPS), rtol=1e-14)


def test_bf16_rounds_the_normalised_value_before_the_product(rng):
    x, weight = (rng.normal(size=s).astype(np.float32) for s in [(64, 256), (256,)])
    want = torch_norm(torch.tensor(x).bfloat16(), torch.tensor(weight).bfloat16())
    x, weight = x.astype(BF16.numpy), weight.astype(BF16.numpy)
    out, rstd = np.full_like(x, np.nan), np.full(64, np.nan, np.float32)
    ref.rmsnorm_forward(out, rstd, x, weight, EPS, 64, 256)
    out, want = out.astype(np.float32), want.float().numpy()
    # rstd may be one F32 rounding off, which now and then turns the rounding to BF16.
    np.testing.assert_allclose(out, want, rtol=2**-7)
    assert (out != want).mean() < 1e-3


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16.numpy], ids=["f32", "bf16"])
def test_forward_residual_is_addition_then_norm(rng, dtype, in_place):
    residual, branch, weight = (rng.normal(size=s).astype(dtype) for s in [(9, 64), (9, 64), 64])
    total = residual + branch
    want, want_rstd = np.empty_like(total), np.empty(9, np.float32)
    ref.rmsnorm_forward(want, want_rstd, total, weight, EPS, 9, 64)

    out, rstd = np.full_like(total, np.nan), np.full(9, np.nan, np.float32)
    residual_out = residual if in_place else np.full_like(total, np.nan)
    ref.rmsnorm_forward_residual(residual_out, out, rstd, residual, branch, weight, EPS, 9, 64)
    np.testing.assert_array_equal(residual_out, total)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(rstd, want_rstd)


def test_post_rounds_once_before_the_sum(rng):
    x, residual, weight = (rng.normal(size=s).astype(np.float32) for s in [(64, 256)] * 2 + [256])
    tx, past, tw = (torch.tensor(a).bfloat16() for a in (x, residual, weight))
    wide = tx.float()  # what transformers' Olmo2RMSNorm computes
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    normalised = (tw * (wide * scale)).bfloat16()
    arrays = [a.astype(BF16.numpy) for a in (x, residual, weight)]
    for given, want in ((arrays[1], past + normalised), (None, normalised)):
        out, rstd = np.full_like(arrays[0], np.nan), np.full(64, np.nan, np.float32)
        ref.rmsnorm_post(out, rstd, arrays[0], given, arrays[2], EPS, 64, 256)
        got, want = out.astype(np.float32), want.float().numpy()
        # rstd may be one F32 rounding off, which now and then turns a rounding to BF16.
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-8)
        assert (got != want).mean() < 1e-3


@pytest.mark.parametrize("with_residual", [False, True])
def test_gradients_equal_torch(rng, with_residual):
    rows, C = 11, 72
    x, d_out, d_residual = (rng.normal(size=(rows, C)) for _ in range(3))
    weight = rng.normal(size=C)
    tx, tw = torch.tensor(x, requires_grad=True), torch.tensor(weight, requires_grad=True)
    # Past the norm the input goes on unchanged, so d_residual simply adds.
    value = (torch_norm(tx, tw) * torch.tensor(d_out)).sum()
    if with_residual:
        value = value + (tx * torch.tensor(d_residual)).sum()
    want, want_weight = torch.autograd.grad(value, (tx, tw))

    rstd = 1 / np.sqrt((x * x).mean(1) + EPS)
    d_x = d_residual if with_residual else np.full_like(x, np.nan)  # in place
    partial, d_weight = np.full((3, C), np.nan), np.full(C, 2.0)
    past = d_residual if with_residual else None
    ref.rmsnorm_backward(d_x, partial, d_out, x, weight, rstd, past, rows, C)
    ref.rmsnorm_backward_weight(d_weight, partial, step_scalars(), 3, C, True, 5)
    # F64 on both sides: sums in another order.
    np.testing.assert_allclose(d_x, want.numpy(), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(d_weight, 2 + want_weight.numpy(), rtol=1e-11, atol=1e-13)


def test_bf16_gradient_is_the_rounded_f32_result(rng):
    rows, C = 5, 64
    arrays = [rng.normal(size=s).astype(BF16.numpy) for s in [(rows, C), (rows, C), C]]
    rstd, past = np.ones(rows, np.float32), rng.normal(size=(rows, C)).astype(BF16.numpy)
    wide, narrow = np.empty((rows, C), np.float32), np.empty((rows, C), BF16.numpy)
    for d_x, cast in ((narrow, BF16.numpy), (wide, np.float32)):
        partial = np.full((2, C), np.nan, np.float32)
        values = [a.astype(cast) for a in arrays]
        ref.rmsnorm_backward(d_x, partial, *values, rstd, past.astype(cast), rows, C)
        assert np.isfinite(partial).all()
    np.testing.assert_array_equal(narrow, wide.astype(BF16.numpy))
