"""References of attention's sinks against torch: a softmax with one more score, of no value."""

import numpy as np
import torch

from llmq.ref.attention import attention_gate as ref

B, T, HEADS, SIZE = 2, 7, 3, 4


def test_result_statistics_and_gradients_equal_torch(rng):
    scores, values = rng.normal(size=(B, HEADS, T, T)), rng.normal(size=(B, HEADS, T, SIZE))
    sinks, d_out = np.array([0.3, -2, 900]), rng.normal(size=(B, T, HEADS, SIZE))
    leaf = torch.tensor(sinks, requires_grad=True)
    both = torch.cat([torch.tensor(scores), leaf.view(1, -1, 1, 1).expand(B, -1, T, 1)], dim=-1)
    probs = both.softmax(dim=-1)[..., :-1]
    want = (probs @ torch.tensor(values)).transpose(1, 2)
    (d_want,) = torch.autograd.grad((want * torch.tensor(d_out)).sum(), leaf)

    without = torch.tensor(scores)
    out = (without.softmax(dim=-1) @ torch.tensor(values)).transpose(1, 2).numpy().copy()
    lse, sizes = np.empty((B, HEADS, T)), (B, T, HEADS)
    without = without.logsumexp(dim=-1).numpy()
    ref.attention_sinks_forward(out, lse, without, sinks, *sizes, head_dim=SIZE)
    np.testing.assert_allclose(out, want.detach().numpy(), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(lse, both.logsumexp(dim=-1).detach().numpy(), rtol=1e-13)
    partial = np.empty((4, HEADS))
    ref.attention_sinks_backward(partial, d_out, out, lse, sinks, *sizes, 4, head_dim=SIZE)
    np.testing.assert_allclose(partial.sum(axis=0), d_want.numpy(), rtol=1e-11, atol=1e-15)
