"""The reference of factors of experts against torch."""

import numpy as np
import torch

from llmq.ref.experts import expert_rows, expert_scale


def test_factors_and_gradients_are_those_of_torch():
    rng, (S, E, top_k) = np.random.default_rng(0), (40, 6, 3)
    chosen = np.argsort(rng.uniform(size=(S, E)), axis=1)[:, :top_k].astype(np.int32)
    weights, d_weights = rng.normal(size=(2, S, top_k)).astype(np.float32)
    factors = torch.tensor(rng.normal(size=E).astype(np.float32), requires_grad=True)
    given = torch.tensor(weights, requires_grad=True)
    want = given * factors[torch.from_numpy(chosen).long()]
    want.backward(torch.from_numpy(d_weights))
    out, order, d_scale = np.empty_like(weights), np.empty(S * top_k, np.int32), np.empty((1, E))
    scale, starts = factors.detach().numpy(), np.zeros(E + 1, np.int32)
    starts[1:] = np.cumsum(np.bincount(chosen.ravel(), minlength=E))
    expert_rows.rows_place(order, np.empty_like(chosen), chosen, None, order.size, E, 1)
    expert_scale.expert_scale_forward(out, weights, scale, chosen, out.size)
    expert_scale.expert_scale_backward(d_weights, d_scale, weights, scale, order, starts)
    np.testing.assert_array_equal(out, want.detach())
    np.testing.assert_array_equal(d_weights, given.grad)
    np.testing.assert_allclose(d_scale[0], factors.grad, rtol=1e-5)
