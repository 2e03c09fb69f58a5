"""Reference of the RMSNorm of values against torch."""

import numpy as np
import pytest
import torch

from llmq.ref.attention import value_norm as ref

B, T, HQ, HKV, HD, EPS = 2, 3, 4, 2, 8, 1e-6


@pytest.mark.parametrize("keys", [False, True])
def test_values_and_gradients_equal_torch(rng, keys):
    heads = HQ + HKV if keys else HQ + 2 * HKV
    product = rng.normal(size=(B, T, heads, HD))
    leaf = torch.tensor(product, requires_grad=True)
    x = leaf[:, :, HQ : HQ + HKV] if keys else leaf[:, :, HQ + HKV :]
    values = x * (x.pow(2).mean(-1, keepdim=True) + EPS).pow(-0.5)
    want = torch.cat([leaf[:, :, : HQ + HKV], values], dim=2)
    d_qkv = rng.normal(size=want.shape)
    (gradient,) = torch.autograd.grad(want, leaf, torch.tensor(d_qkv))

    qkv, rstd = np.empty_like(d_qkv) if keys else product.copy(), np.empty((B, T, HKV))
    sizes = (B * T, HQ, HKV)
    ref.value_norm_forward(qkv, rstd, product if keys else None, EPS, *sizes, keys=keys)
    np.testing.assert_allclose(qkv, want.detach().numpy(), rtol=1e-12)
    d_product = np.empty_like(product) if keys else None
    ref.value_norm_backward(d_product, d_qkv, qkv, rstd, *sizes, keys=keys)
    got = d_product if keys else d_qkv
    np.testing.assert_allclose(got, gradient.numpy(), rtol=1e-9, atol=1e-5)  # eps is left out
