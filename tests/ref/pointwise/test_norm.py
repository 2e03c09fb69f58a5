"""References of norm against torch: of RMSNorm, then of LayerNorm."""

import numpy as np
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from llmq.base.dtypes import BF16
from llmq.ref.pointwise import norm as ref
from llmq.ref.pointwise.reduce import column_sum
from tests.harness import step_scalars

EPS = 1e-5


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm that transformers' Qwen2RMSNorm and LlamaRMSNorm compute."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def test_forward_equals_torch(rng):
    x, weight = rng.normal(size=(7, 72)), rng.normal(size=72)
    out, rstd = np.full((7, 72), np.nan), np.full(7, np.nan)
    ref.norm_forward(out, None, rstd, x, weight, None, EPS, 7, 72)
    want = torch_norm(torch.tensor(x), torch.tensor(weight))
    # F64 on both sides: a few roundings in another order.
    np.testing.assert_allclose(out, want.numpy(), rtol=1e-13)
    np.testing.assert_allclose(rstd, 1 / np.sqrt((x * x).mean(1) + EPS), rtol=1e-14)


def test_bf16_rounds_the_normalised_value_before_the_product(rng):
    x, weight = (rng.normal(size=s).astype(np.float32) for s in [(64, 256), (256,)])
    want = torch_norm(torch.tensor(x).bfloat16(), torch.tensor(weight).bfloat16())
    x, weight = x.astype(BF16.numpy), weight.astype(BF16.numpy)
    out, rstd = np.full_like(x, np.nan), np.full(64, np.nan, np.float32)
    ref.norm_forward(out, None, rstd, x, weight, None, EPS, 64, 256)
    out, want = out.astype(np.float32), want.float().numpy()
    # rstd may be one F32 rounding off, which now and then turns the rounding to BF16.
    np.testing.assert_allclose(out, want, rtol=2**-7)
    assert (out != want).mean() < 1e-3


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16.numpy], ids=["f32", "bf16"])
def test_forward_residual_is_addition_then_norm(rng, dtype, in_place, centred):
    shapes = [(9, 64), (9, 64), 64, 64]
    residual, branch, weight, bias = (rng.normal(size=s).astype(dtype) for s in shapes)
    total, stats = residual + branch, np.empty(9, np.float32)
    bias, mean = (bias, stats.copy()) if centred else (None, None)
    want = [np.empty_like(total), mean, stats]
    ref.norm_forward(*want, total, weight, bias, EPS, 9, 64)

    got = [None if a is None else np.full_like(a, np.nan) for a in want]
    residual_out = residual if in_place else np.full_like(total, np.nan)
    inputs = (residual, branch, weight, bias)
    ref.norm_forward_residual(residual_out, *got, *inputs, EPS, 9, 64)
    np.testing.assert_array_equal(residual_out, total)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_post_rounds_once_before_the_sum(rng):
    x, residual, weight = (rng.normal(size=s).astype(np.float32) for s in [(64, 256)] * 2 + [256])
    tx, past, tw = (torch.tensor(a).bfloat16() for a in (x, residual, weight))
    wide = tx.float()  # what transformers' Olmo2RMSNorm computes
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    normalised = (tw * (wide * scale)).bfloat16()
    arrays = [a.astype(BF16.numpy) for a in (x, residual, weight)]
    for given, want in ((arrays[1], past + normalised), (None, normalised)):
        out, rstd = np.full_like(arrays[0], np.nan), np.full(64, np.nan, np.float32)
        ref.norm_post(out, rstd, arrays[0], given, arrays[2], EPS, 64, 256)
        got, want = out.astype(np.float32), want.float().numpy()
        # rstd may be one F32 rounding off, which now and then turns a rounding to BF16.
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-8)
        assert (got != want).mean() < 1e-3


@pytest.mark.parametrize("op", ["forward", "forward_residual", "post"])
def test_offset_rounds_as_gemma3(rng, op):
    x, past, weight = (rng.normal(size=s).astype(np.float32) for s in [(64, 256)] * 2 + [256])
    norm = Gemma3RMSNorm(256, EPS).bfloat16()
    norm.weight.data = torch.tensor(weight).bfloat16()
    tx, tpast = torch.tensor(x).bfloat16(), torch.tensor(past).bfloat16()
    x, past, weight = (a.astype(BF16.numpy) for a in (x, past, weight))
    out, rstd = np.full_like(x, np.nan), np.full(64, np.nan, np.float32)
    if op == "forward":
        ref.norm_forward(out, None, rstd, x, weight, None, EPS, 64, 256, offset=1)
        want = norm(tx)
    elif op == "forward_residual":
        args = (out, None, rstd, x, past, weight, None, EPS, 64, 256)
        ref.norm_forward_residual(np.empty_like(x), *args, offset=1)
        want = norm(tx + tpast)
    else:
        ref.norm_post(out, rstd, x, past, weight, EPS, 64, 256, offset=1)
        want = tpast + norm(tx)
    out, want = out.astype(np.float32), want.detach().float().numpy()
    # rstd may be one F32 rounding off, which now and then turns a rounding to BF16.
    np.testing.assert_allclose(out, want, rtol=2**-7, atol=2**-8)
    assert (out != want).mean() < 1e-3


def test_gradients_with_an_offset_are_those_of_the_larger_weight(rng):
    x, d_out, weight = rng.normal(size=(5, 64)), rng.normal(size=(5, 64)), rng.normal(size=64)
    rstd, results = 1 / np.sqrt((x * x).mean(1) + EPS), []
    for offset in (0, 1):
        d_x, partial = np.full_like(x, np.nan), np.full((1, 1, 64), np.nan)
        w = weight + (1 - offset)
        ref.norm_backward(d_x, partial, d_out, x, w, None, rstd, None, 5, 64, offset=offset)
        results.append((d_x, partial))
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_gradients_equal_torch(rng, centred, with_residual):
    rows, C = 11, 72
    x, d_out, d_residual = (rng.normal(size=(rows, C)) for _ in range(3))
    weight, bias = rng.normal(size=C), rng.normal(size=C)
    tx, tw, tb = (torch.tensor(a, requires_grad=True) for a in (x, weight, bias))
    layer_norm = torch.nn.functional.layer_norm
    out = layer_norm(tx, (C,), tw, tb, EPS) if centred else torch_norm(tx, tw)
    value = (out * torch.tensor(d_out)).sum()
    if with_residual:  # past the norm the input goes on unchanged, so d_residual simply adds
        value = value + (tx * torch.tensor(d_residual)).sum()
    want = [g.numpy() for g in torch.autograd.grad(value, (tx, tw, tb)[: 2 + centred])]

    mean = x.mean(1) if centred else None
    rstd = 1 / np.sqrt((x.var(1) if centred else (x * x).mean(1)) + EPS)
    d_x = d_residual if with_residual else np.full_like(x, np.nan)  # in place
    past = d_residual if with_residual else None
    partial = np.full((1 + centred, 3, C), np.nan)
    ref.norm_backward(d_x, partial, d_out, x, weight, mean, rstd, past, rows, C)
    d_weight, d_bias, scalars = np.full(C, 2.0), np.full(C, np.nan), step_scalars()
    column_sum(d_weight, partial[0], scalars, 3, C, True, 5)
    if centred:
        column_sum(d_bias, partial[1], scalars, 3, C, False, 6)
    # F64 on both sides: sums in another order.
    for got, expected in zip((d_x, d_weight - 2, d_bias), want, strict=False):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)


def test_bf16_gradient_is_the_rounded_f32_result(rng):
    rows, C = 5, 64
    arrays = [rng.normal(size=s).astype(BF16.numpy) for s in [(rows, C), (rows, C), C]]
    rstd, past = np.ones(rows, np.float32), rng.normal(size=(rows, C)).astype(BF16.numpy)
    wide, narrow = np.empty((rows, C), np.float32), np.empty((rows, C), BF16.numpy)
    for d_x, cast in ((narrow, BF16.numpy), (wide, np.float32)):
        partial = np.full((1, 2, C), np.nan, np.float32)
        values = [a.astype(cast) for a in arrays]
        ref.norm_backward(d_x, partial, *values, None, rstd, past.astype(cast), rows, C)
        assert np.isfinite(partial).all()
    np.testing.assert_array_equal(narrow, wide.astype(BF16.numpy))


def test_layernorm_equals_torch(rng):
    x, weight, bias = rng.normal(size=(7, 72)) * 3 + 5, rng.normal(size=72), rng.normal(size=72)
    out, mean, rstd = np.full((7, 72), np.nan), np.full(7, np.nan), np.full(7, np.nan)
    ref.norm_forward(out, mean, rstd, x, weight, bias, EPS, 7, 72)
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
    ref.norm_forward(np.empty_like(x), mean, rstd, x, ones, zeros, EPS, 4, 4096)
    # mean(x^2) - mean^2 would lose everything: 1e8 has steps of 8 in F32. A mean that is rounded
    # by 1e4 * 2^-23 makes the variance wrong by its square.
    np.testing.assert_allclose(rstd, 1 / np.sqrt(x.astype(np.float64).var(1) + EPS), rtol=1e-4)


def test_bf16_layernorm_rounds_once(rng):
    arrays = [rng.normal(size=s).astype(BF16.numpy) for s in [(5, 64), 64, 64]]
    wide, narrow = np.empty((5, 64), np.float32), np.empty((5, 64), BF16.numpy)
    for out in (wide, narrow):
        values = [a.astype(out.dtype) for a in arrays]
        stats = np.empty(5, np.float32), np.empty(5, np.float32)
        ref.norm_forward(out, *stats, *values, EPS, 5, 64)
    np.testing.assert_array_equal(narrow, wide.astype(BF16.numpy))
