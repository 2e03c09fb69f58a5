"""References of the gates of delta nets and state spaces against torch."""

import numpy as np
import pytest
import torch

from llmq.ref.delta import delta_gates as ref

ROWS, HEADS, COLUMNS, OFFSET, LEAST = 300, 3, 11, 4, 0.3


@pytest.mark.parametrize("parts", [2, 1])
def test_equals_torch(rng, parts):
    sizes = (LEAST, ROWS, HEADS, COLUMNS, OFFSET, parts)
    x = rng.normal(size=(ROWS, COLUMNS)) * 4
    x[0, OFFSET + (parts - 1) * HEADS] = 30  # above the threshold of softplus
    a_log, dt_bias = rng.normal(size=(2, HEADS))
    d_gates = rng.normal(size=(ROWS, 2, HEADS))
    leaves = [torch.tensor(v, requires_grad=True) for v in (x, a_log, dt_bias)]
    *b, a = leaves[0][:, OFFSET : OFFSET + parts * HEADS].split(HEADS, -1)
    step = torch.nn.functional.softplus(a + leaves[2]).clamp(min=LEAST)
    want = torch.stack([-leaves[1].exp() * step, b[0].sigmoid() if b else step], 1)
    gradients = torch.autograd.grad((want * torch.tensor(d_gates)).sum(), leaves)

    gates, d_x = np.full(d_gates.shape, np.nan), np.zeros_like(x)
    ref.delta_gates_forward(gates, x, a_log, dt_bias, *sizes)
    partials = np.full((2, -(-ROWS // ref.ROWS), HEADS), np.nan)
    ref.delta_gates_backward(d_x, *partials, d_gates, gates, x, a_log, dt_bias, *sizes)
    got = (gates, d_x, *partials.sum(1))
    # F64 on both sides: functions of two libraries, sums in another order.
    for one, other in zip(got, (want, *gradients), strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-10, atol=1e-12)
