"""Reference of the gated activation of pairs against torch's own gradients."""

import numpy as np
import torch

from llmq.ref.pointwise import swiglu as ref


def test_result_and_gradient_equal_torch(rng):
    pairs, d_out = rng.normal(size=(40, 32)) * 3, rng.normal(size=(40, 16))
    alpha, limit = 1.702, 2.0
    leaf = torch.tensor(pairs, requires_grad=True)
    gate, up = leaf[..., ::2].clamp(max=limit), leaf[..., 1::2].clamp(-limit, limit)
    want = (up + 1) * gate * torch.sigmoid(alpha * gate)
    (want * torch.tensor(d_out)).sum().backward()
    out = np.empty_like(d_out)
    ref.clamped_swiglu_forward(out, pairs, out.size, alpha, limit)
    np.testing.assert_allclose(out, want.detach().numpy(), rtol=1e-12)
    ref.clamped_swiglu_backward(pairs, d_out, pairs, out.size, alpha, limit)  # in place
    np.testing.assert_allclose(pairs, leaf.grad.numpy(), rtol=1e-10, atol=1e-13)
    assert 0.1 < (pairs == 0).mean() < 0.5
