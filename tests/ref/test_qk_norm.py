"""References of qk_norm against torch."""

import numpy as np
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from llmq.base.dtypes import BF16
from llmq.ref import qk_norm as ref
from llmq.ref.bias import column_sum
from llmq.ref.norm import norm_forward
from tests.harness import step_scalars

EPS = 1e-6
B, T, HQ, HKV, HD = 2, 3, 4, 2, 64
HEADS = HQ + HKV


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm of every head, as transformers' Qwen3 does to queries and keys."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def packed(rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """qkv, q_weight and k_weight in F64."""
    return rng.normal(size=(B, T, HEADS + HKV, HD)), rng.normal(size=HD), rng.normal(size=HD)


def test_forward_equals_torch(rng):
    before, q_weight, k_weight = packed(rng)
    qkv = before.copy()
    raw, rstd = np.full((B, T, HEADS, HD), np.nan), np.full((B, T, HEADS), np.nan)
    ref.qk_norm_forward(qkv, raw, rstd, q_weight, k_weight, EPS, B * T, HQ, HKV, 1)
    x = torch.tensor(before)
    want = [torch_norm(x[:, :, :HQ], torch.tensor(q_weight))]
    want += [torch_norm(x[:, :, HQ:HEADS], torch.tensor(k_weight)), x[:, :, HEADS:]]
    # F64 on both sides: a few roundings in another order.
    np.testing.assert_allclose(qkv, torch.cat(want, 2).numpy(), rtol=1e-13)
    np.testing.assert_array_equal(raw, before[:, :, :HEADS])
    np.testing.assert_array_equal(qkv[:, :, HEADS:], before[:, :, HEADS:])


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
        d_qkv, partial = x.copy(), np.full((2, HD), np.nan)
        weights = (q_weight + (1 - offset), k_weight + (1 - offset))
        args = (raw, rstd, *weights, B * T, HQ, HKV, 1)
        ref.qk_norm_backward(d_qkv, partial, *args, offset=offset)
        results.append((d_qkv, partial))
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)


def test_gradients_equal_torch(rng):
    x, q_weight, k_weight = packed(rng)
    d_out = rng.normal(size=x.shape)
    tx, tq, tk = (torch.tensor(a, requires_grad=True) for a in (x, q_weight, k_weight))
    out = [torch_norm(tx[:, :, :HQ], tq), torch_norm(tx[:, :, HQ:HEADS], tk), tx[:, :, HEADS:]]
    value = (torch.cat(out, 2) * torch.tensor(d_out)).sum()
    want = [g.numpy() for g in torch.autograd.grad(value, (tx, tq, tk))]

    raw = x[:, :, :HEADS]
    rstd = 1 / np.sqrt((raw * raw).mean(-1) + EPS)
    partial, d_q, d_k = np.full((5, HD), np.nan), np.full(HD, 2.0), np.full(HD, np.nan)
    ref.qk_norm_backward(d_out, partial, raw, rstd, q_weight, k_weight, B * T, HQ, HKV, 2)
    column_sum(d_q, partial[:2], step_scalars(), 2, HD, True, 5)
    column_sum(d_k, partial[2:], step_scalars(), 3, HD, False, 6)
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
        partial = np.full((2, HD), np.nan, np.float32)
        ref.qk_norm_backward(d_qkv, partial, arrays[0], rstd, *arrays[1:], B * T, HQ, HKV, 1)
        assert np.isfinite(partial).all()
        results.append(d_qkv.astype(BF16.numpy))
    np.testing.assert_array_equal(*results)
