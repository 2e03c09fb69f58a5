"""References of wide_qk_norm against torch."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16
from llmq.ref import wide_qk_norm as ref
from llmq.ref.bias import column_sum
from tests.harness import step_scalars

EPS = 1e-6
B, T, HQ, HKV, HD = 2, 3, 4, 2, 8
CQ, CK = HQ * HD, HKV * HD


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What transformers' Olmo2RMSNorm computes."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


def torch_forward(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """x: (tokens, CQ + 2 CK)."""
    parts = torch_norm(x[:, :CQ], q), torch_norm(x[:, CQ : CQ + CK], k), x[:, CQ + CK :]
    return torch.cat(parts, 1)


def packed(rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """qkv, q_weight and k_weight in F64."""
    return rng.normal(size=(B * T, CQ + 2 * CK)), rng.normal(size=CQ), rng.normal(size=CK)


def forward(qkv: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, real=np.float64) -> tuple:
    out = qkv.copy().reshape(B, T, HQ + 2 * HKV, HD)
    raw = np.full((B, T, HQ + HKV, HD), np.nan, qkv.dtype)
    rstd = np.full((B, T, 2), np.nan, real)
    ref.wide_qk_norm_forward(out, raw, rstd, q_weight, k_weight, EPS, B * T, CQ, CK, 1)
    return out.reshape(B * T, -1), raw, rstd


def test_forward_equals_torch(rng):
    arrays = packed(rng)
    out, raw, _ = forward(*arrays)
    want = torch_forward(*map(torch.tensor, arrays)).numpy()
    # F64 on both sides: a few roundings in another order.
    np.testing.assert_allclose(out, want, rtol=1e-13)
    np.testing.assert_array_equal(raw.reshape(B * T, -1), arrays[0][:, : CQ + CK])


def test_bf16_rounds_once(rng):
    arrays = [a.astype(np.float32) for a in packed(rng)]
    want = torch_forward(*(torch.tensor(a).bfloat16() for a in arrays)).float().numpy()
    out, _, _ = forward(*(a.astype(BF16.numpy) for a in arrays), np.float32)
    out = out.astype(np.float32)
    # rstd may be one F32 rounding off, which now and then turns the rounding to BF16.
    np.testing.assert_allclose(out, want, rtol=2**-7)
    assert (out != want).mean() < 1e-2


def test_gradients_equal_torch(rng):
    x, q_weight, k_weight = arrays = packed(rng)
    d_out = rng.normal(size=x.shape)
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    value = (torch_forward(*leaves) * torch.tensor(d_out)).sum()
    want = [g.numpy() for g in torch.autograd.grad(value, leaves)]

    _, raw, rstd = forward(*arrays)
    partials = [np.full((3, CQ), np.nan), np.full((2, CK), np.nan)]
    d_q, d_k = np.full(CQ, 2.0), np.full(CK, np.nan)
    sizes = (B * T, CQ, CK, 3)
    ref.wide_qk_norm_backward(d_out, *partials, raw, rstd, q_weight, k_weight, *sizes)
    column_sum(d_q, partials[0], step_scalars(), 3, CQ, True, 5)
    column_sum(d_k, partials[1], step_scalars(), 2, CK, False, 6)
    # F64 on both sides: sums in another order.
    for got, expected in zip((d_out, d_q - 2, d_k), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ref.CASES)
def test_cases_have_whole_vectors(name):
    _, _, Hq, Hkv, Hd = ref.CASES[name]
    assert Hq * Hd % 8 == Hkv * Hd % 8 == 0
