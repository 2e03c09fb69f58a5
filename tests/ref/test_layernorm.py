"""References of layernorm against torch."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16
from llmq.ref import layernorm as ref
from tests.harness import step_scalars

EPS = 1e-5


def test_forward_equals_torch(rng):
    x, weight, bias = rng.normal(size=(7, 72)) * 3 + 5, rng.normal(size=72), rng.normal(size=72)
    out, mean, rstd = np.full((7, 72), np.nan), np.full(7, np.nan), np.full(7, np.nan)
    ref.layernorm_forward(out, mean, rstd, x, weight, bias, EPS, 7, 72)
    tensors = map(torch.tensor, (x, weight, bias))
    want, want_mean, want_rstd = torch.native_layer_norm(next(tensors), (72,), *tensors, EPS)
    # F64 on both sides: sums in another order, and a cancellation of a few units.
    np.testing.assert_allclose(out, want.numpy(), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(mean, want_mean.numpy()[:, 0], rtol=1e-13)
    np.testing.assert_allclose(rstd, want_rstd.numpy()[:, 0], rtol=1e-13)


def test_variance_survives_a_large_mean(rng):
    x = (1e4 + rng.normal(size=(4, 4096))).astype(np.float32)
    mean, rstd = np.full(4, np.nan, np.float32), np.full(4, np.nan, np.float32)
    ones, zeros = np.ones(4096, np.float32), np.zeros(4096, np.float32)
    ref.layernorm_forward(np.empty_like(x), mean, rstd, x, ones, zeros, EPS, 4, 4096)
    # mean(x^2) - mean^2 would lose everything: 1e8 has steps of 8 in F32. A mean that is rounded
    # by 1e4 * 2^-23 makes the variance wrong by its square.
    np.testing.assert_allclose(rstd, 1 / np.sqrt(x.astype(np.float64).var(1) + EPS), rtol=1e-4)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16.numpy], ids=["f32", "bf16"])
def test_forward_residual_is_addition_then_norm(rng, dtype, in_place):
    shapes = [(9, 64), (9, 64), 64, 64]
    residual, branch, weight, bias = (rng.normal(size=s).astype(dtype) for s in shapes)
    total = residual + branch
    want = [np.empty_like(total), np.empty(9, np.float32), np.empty(9, np.float32)]
    ref.layernorm_forward(*want, total, weight, bias, EPS, 9, 64)

    got = [np.full_like(a, np.nan) for a in want]
    residual_out = residual if in_place else np.full_like(total, np.nan)
    inputs = (residual, branch, weight, bias)
    ref.layernorm_forward_residual(residual_out, *got, *inputs, EPS, 9, 64)
    np.testing.assert_array_equal(residual_out, total)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_bf16_rounds_once(rng):
    arrays = [rng.normal(size=s).astype(BF16.numpy) for s in [(5, 64), 64, 64]]
    wide, narrow = np.empty((5, 64), np.float32), np.empty((5, 64), BF16.numpy)
    for out in (wide, narrow):
        values = [a.astype(out.dtype) for a in arrays]
        stats = np.empty(5, np.float32), np.empty(5, np.float32)
        ref.layernorm_forward(out, *stats, *values, EPS, 5, 64)
    np.testing.assert_array_equal(narrow, wide.astype(BF16.numpy))


@pytest.mark.parametrize("with_residual", [False, True])
def test_gradients_equal_torch(rng, with_residual):
    rows, C = 11, 72
    x, d_out, d_residual = (rng.normal(size=(rows, C)) for _ in range(3))
    weight, bias = rng.normal(size=C), rng.normal(size=C)
    tx, tw, tb = (torch.tensor(a, requires_grad=True) for a in (x, weight, bias))
    value = (torch.nn.functional.layer_norm(tx, (C,), tw, tb, EPS) * torch.tensor(d_out)).sum()
    if with_residual:  # past the norm the input goes on unchanged, so d_residual simply adds
        value = value + (tx * torch.tensor(d_residual)).sum()
    want = [g.numpy() for g in torch.autograd.grad(value, (tx, tw, tb))]

    mean, rstd = x.mean(1), 1 / np.sqrt(x.var(1) + EPS)
    d_x = d_residual if with_residual else np.full_like(x, np.nan)  # in place
    past = d_residual if with_residual else None
    partial, d_weight, d_bias = np.full((2, 3, C), np.nan), np.full(C, 2.0), np.full(C, np.nan)
    ref.layernorm_backward(d_x, partial, d_out, x, weight, mean, rstd, past, rows, C)
    scalars = step_scalars()
    ref.layernorm_backward_parameter(d_weight, partial[0], scalars, 3, C, True, 5)
    ref.layernorm_backward_parameter(d_bias, partial[1], scalars, 3, C, False, 6)
    # F64 on both sides: sums in another order.
    for got, expected in zip((d_x, d_weight - 2, d_bias), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)
