"""References of gated attention against torch."""

import numpy as np
import torch

from llmq.ref.attention import attention_gate as ref

ROWS, HQ, HKV, SIZE = 5, 3, 2, 4


def test_split_is_what_transformers_takes_apart(rng):
    """Its query product has a query and a gate for each head, then come keys and values."""
    product = rng.normal(size=(ROWS, 2 * (HQ + HKV) * SIZE))
    of_q = torch.tensor(product[:, : 2 * HQ * SIZE])
    query, gate = torch.chunk(of_q.view(ROWS, -1, 2 * SIZE), 2, dim=-1)
    qkv, gates = np.empty((ROWS, (HQ + 2 * HKV) * SIZE)), np.empty((ROWS, HQ * SIZE))
    ref.attention_gate_split(qkv, gates, product, ROWS, HQ, HKV, head_dim=SIZE)
    np.testing.assert_array_equal(qkv[:, : HQ * SIZE], query.reshape(ROWS, -1).numpy())
    np.testing.assert_array_equal(qkv[:, HQ * SIZE :], product[:, 2 * HQ * SIZE :])
    np.testing.assert_array_equal(gates, gate.reshape(ROWS, -1).numpy())
    back = np.empty_like(product)
    ref.attention_gate_merge(back, qkv, gates, ROWS, HQ, HKV, head_dim=SIZE)
    np.testing.assert_array_equal(back, product)


def test_gradients_equal_torch(rng):
    x, gate, d_out = rng.normal(size=(3, ROWS, 8))
    leaves = [torch.tensor(v, requires_grad=True) for v in (x, gate)]
    want = leaves[0] * leaves[1].sigmoid()
    gradients = torch.autograd.grad((want * torch.tensor(d_out)).sum(), leaves)
    out, d_gate = np.empty_like(x), np.empty_like(x)
    ref.attention_gate_forward(out, x, gate, x.size)
    ref.attention_gate_backward(d_out, d_gate, d_out, x, gate, x.size)
    for one, other in zip((out, d_out, d_gate), (want, *gradients), strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-12)
