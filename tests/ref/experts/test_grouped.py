"""References of grouped products against torch."""

import numpy as np
import pytest
import torch

from llmq.ref.experts import grouped as ref
from tests.harness import step_scalars

STARTS = np.array([0, 3, 3, 40, 41, 41], np.int32)  # two experts without rows, one at the end
R, N, K, E = 41, 16, 24, 5


@pytest.mark.parametrize("trans_b", [0, 1])
def test_product_and_gradients_equal_torch(trans_b):
    rng = np.random.default_rng(trans_b)
    shape = (E, N, K) if trans_b else (E, K, N)
    x, w, b, d = (
        torch.tensor(rng.normal(size=s), requires_grad=True)
        for s in ((R, K), shape, (E, N), (R, N))
    )
    of_row = torch.tensor(np.repeat(np.arange(E), np.diff(STARTS)))
    matrices = w[of_row].transpose(1, 2) if trans_b else w[of_row]
    more = rng.normal(size=(R, N))
    want = torch.bmm(x[:, None], matrices)[:, 0] + b[of_row] + torch.tensor(more)
    want.backward(d.detach())

    arrays = [t.detach().numpy() for t in (x, w, b)]
    out = np.full((R, N), np.nan)
    x, w, b = arrays
    ref.grouped_product(out, x, w, None, None, b, more, STARTS, R, N, K, E, trans_b=trans_b, half=0)
    np.testing.assert_allclose(out, want.detach().numpy(), rtol=1e-12, atol=1e-13)
    d = d.detach().numpy()
    d_x = np.full((R, K), np.nan)
    unscaled = (None, None, None, None)
    ref.grouped_product(d_x, d, w, *unscaled, STARTS, R, K, N, E, trans_b=1 - trans_b, half=0)
    np.testing.assert_allclose(d_x, x_grad(of_row, w, d, trans_b), rtol=1e-12, atol=1e-13)


def x_grad(of_row, w, d, trans_b):
    return np.einsum("rn,rnk->rk" if trans_b else "rn,rkn->rk", d, w[of_row.numpy()])


@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_equal_torch(accumulate):
    rng = np.random.default_rng(5)
    d, x = rng.normal(size=(R, N)), rng.normal(size=(R, K))
    before = rng.normal(size=(E, N, K))
    of_row = np.repeat(np.arange(E), np.diff(STARTS))
    want = np.zeros((E, N, K))
    np.add.at(want, of_row, d[:, :, None] * x[:, None, :])
    scalars = step_scalars(seed=1)
    d_w = before.copy()
    ref.grouped_gradient(d_w, d, x, scalars, STARTS, R, N, K, E, accumulate, 3)
    np.testing.assert_allclose(d_w, want + accumulate * before, rtol=1e-11, atol=1e-13)
    for e in (1, 4):  # without rows
        np.testing.assert_array_equal(d_w[e], before[e] if accumulate else 0)
