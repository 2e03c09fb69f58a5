"""References of qk_norm against torch."""

import numpy as np
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from llmq.base.dtypes import BF16
from llmq.ref.attention import qk_norm as ref
from llmq.ref.pointwise.norm import norm_forward
from llmq.ref.pointwise.reduce import column_sum
from tests.harness import step_scalars

EPS = 1e-6
B, T, HQ, HKV, HD = 2, 3, 4, 2, 64
HEADS = HQ + HKV
WIDE = pytest.mark.parametrize("wide", [False, True], ids=["heads", "wide"])


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm of every row, rounded as transformers' Olmo2RMSNorm does."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


def torch_forward(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """x: packed. Rows are as wide as their weight."""
    parts = x[:, :, :HQ], x[:, :, HQ:HEADS]
    out = [
        torch_norm(part.reshape(B, T, -1, len(weight)), weight).reshape(part.shape)
        for part, weight in zip(parts, (q, k), strict=True)
    ]
    return torch.cat([*out, x[:, :, HEADS:]], 2)


def packed(rng, wide: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """qkv, q_weight and k_weight in F64."""
    q, k = (HQ * HD, HKV * HD) if wide else (HD, HD)
    return rng.normal(size=(B, T, HEADS + HKV, HD)), rng.normal(size=q), rng.normal(size=k)


def forward(qkv: np.ndarray, q: np.ndarray, k: np.ndarray, wide: bool, real=np.float64) -> tuple:
    """The results for qkv, raw, rstd."""
    out, raw = qkv.copy(), np.full((B, T, HEADS, HD), np.nan, qkv.dtype)
    rstd = np.full((B, T, 2 if wide else HEADS), np.nan, real)
    ref.qk_norm_forward(out, raw, rstd, q, k, EPS, B * T, HQ, HKV, 1, wide=wide)
    return out, raw, rstd


@WIDE
def test_forward_equals_torch(rng, wide):
    arrays = packed(rng, wide)
    out, raw, _ = forward(*arrays, wide)
    # F64 on both sides: a few roundings in another order.
    np.testing.assert_allclose(out, torch_forward(*map(torch.tensor, arrays)).numpy(), rtol=1e-13)
    np.testing.assert_array_equal(raw, arrays[0][:, :, :HEADS])
    np.testing.assert_array_equal(out[:, :, HEADS:], arrays[0][:, :, HEADS:])


def test_wide_rows_are_rounded_once(rng):
    arrays = [a.astype(np.float32) for a in packed(rng, wide=True)]
    want = torch_forward(*(torch.tensor(a).bfloat16() for a in arrays)).float().numpy()
    out, _, _ = forward(*(a.astype(BF16.numpy) for a in arrays), True, np.float32)
    out = out.astype(np.float32)
    # rstd may be one F32 rounding off, which now and then turns the rounding to BF16.
    np.testing.assert_allclose(out, want, rtol=2**-7)
    assert (out != want).mean() < 1e-2


@pytest.mark.parametrize("dtype", [np.float32, BF16.numpy], ids=["f32", "bf16"])
def test_forward_equals_norm(rng, dtype):
    qkv, q_weight, k_weight = (a.astype(dtype) for a in packed(rng))
    raw = np.full((B, T, HEADS, HD), np.nan, dtype)
    rstd = np.full((B, T, HEADS), np.nan, np.float32)
    ref.qk_norm_forward(qkv, raw, rstd, q_weight, k_weight, EPS, B * T, HQ, HKV, 1)
    for weight, heads in ((q_weight, slice(HQ)), (k_weight, slice(HQ, HEADS))):
        rows = raw[:, :, heads].reshape(-1, HD)
        want, want_rstd = np.empty_like(rows), np.empty(len(rows), np.float32)
        norm_forward(want, None, want_rstd, rows, weight, None, EPS, len(rows), HD)
        np.testing.assert_array_equal(qkv[:, :, heads].reshape(-1, HD), want)
        np.testing.assert_array_equal(rstd[:, :, heads].reshape(-1), want_rstd)


def test_offset_rounds_as_gemma3(rng):
    qkv, q_weight, k_weight = (a.astype(BF16.numpy) for a in packed(rng))
    before = torch.tensor(qkv.astype(np.float32)).bfloat16()
    raw = np.full((B, T, HEADS, HD), np.nan, qkv.dtype)
    rstd = np.full((B, T, HEADS), np.nan, np.float32)
    args = (raw, rstd, q_weight, k_weight, EPS, B * T, HQ, HKV, 1)
    ref.qk_norm_forward(qkv, *args, offset=1)
    for weight, heads in ((q_weight, slice(HQ)), (k_weight, slice(HQ, HEADS))):
        norm = Gemma3RMSNorm(HD, EPS).bfloat16()
        norm.weight.data = torch.tensor(weight.astype(np.float32)).bfloat16()
        want, got = norm(before[:, :, heads]).detach().float().numpy(), qkv[:, :, heads]
        # rstd may be one F32 rounding off, which now and then turns the rounding to BF16.
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-7)
        assert (got.astype(np.float32) != want).mean() < 1e-2


def test_gradients_with_an_offset_are_those_of_the_larger_weight(rng):
    x, q_weight, k_weight = packed(rng)
    raw, rstd = x[:, :, :HEADS], rng.uniform(0.5, 2, size=(B, T, HEADS))
    results = []
    for offset in (0, 1):
        d_qkv, partials = x.copy(), np.full((2, 1, HD), np.nan)
        weights = (q_weight + (1 - offset), k_weight + (1 - offset))
        args = (raw, rstd, *weights, B * T, HQ, HKV, 1)
        ref.qk_norm_backward(d_qkv, *partials, *args, offset=offset)
        results.append((d_qkv, partials))
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)


@WIDE
def test_gradients_equal_torch(rng, wide):
    x, q_weight, k_weight = arrays = packed(rng, wide)
    d_out = rng.normal(size=x.shape)
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    value = (torch_forward(*leaves) * torch.tensor(d_out)).sum()
    want = [g.numpy() for g in torch.autograd.grad(value, leaves)]

    _, raw, rstd = forward(*arrays, wide)
    partials = np.full((2, q_weight.size), np.nan), np.full((3, k_weight.size), np.nan)
    d_q, d_k = np.full(q_weight.size, 2.0), np.full(k_weight.size, np.nan)
    args = (d_out, *partials, raw, rstd, q_weight, k_weight, B * T, HQ, HKV, 2)
    ref.qk_norm_backward(*args, wide=wide)
    column_sum(d_q, partials[0], step_scalars(), 2, d_q.size, True, 5)
    column_sum(d_k, partials[1], step_scalars(), 3, d_k.size, False, 6)
    # F64 on both sides: sums in another order.
    for got, expected in zip((d_out, d_q - 2, d_k), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)


def test_bf16_gradient_is_the_rounded_f32_result(rng):
    qkv, q_weight, k_weight = (a.astype(BF16.numpy) for a in packed(rng))
    raw = rng.normal(size=(B, T, HEADS, HD)).astype(BF16.numpy)
    rstd = rng.uniform(0.5, 2, size=(B, T, HEADS)).astype(np.float32)
    results = []
    for cast in (BF16.numpy, np.float32):
        d_qkv, *arrays = (a.astype(cast) for a in (qkv, raw, q_weight, k_weight))
        partials = np.full((2, 1, HD), np.nan, np.float32)
        ref.qk_norm_backward(d_qkv, *partials, arrays[0], rstd, *arrays[1:], B * T, HQ, HKV, 1)
        assert np.isfinite(partials).all()
        results.append(d_qkv.astype(BF16.numpy))
    np.testing.assert_array_equal(*results)
