"""Reference of adapters' gradients: those that torch derives from each adapter's own product."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import STEP_SCALARS_WORDS
from llmq.ref.product.adapter import adapter_backward_finish, adapter_backward_partials


@pytest.mark.parametrize("accumulate", [False, True])
def test_equals_torch(rng, accumulate):
    spans, rank, columns, rows, N = ((0, 40), (56, 80)), 3, 8, 50, 88

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    d_out, h, b = normal(rows, N), normal(rows, columns), normal(64, rank)
    d_h, before = np.full((rows, columns), np.nan, np.float32), normal(64, rank)
    d_b = before.copy() if accumulate else np.full_like(before, np.nan)
    h_partial = np.full((5, rows, 8), np.nan, np.float32)  # splits of 16 columns: 3 and 2
    b_partial = np.full((4, 64, 8), np.nan, np.float32)  # groups of 16 rows
    adapter_backward_partials(
        h_partial, b_partial, d_out, h, b, rows, N, columns, 16, *spans[0], *spans[1], 0, 0,
        rank=rank, block_rows=16,
    )  # fmt: skip
    scalars = np.zeros(STEP_SCALARS_WORDS, np.int32)
    adapter_backward_finish(
        d_h, d_b, h_partial, b_partial, scalars, int(accumulate), 7, 2.0, rows, columns, 64, 4,
        3, 5, 5, rank=rank,
    )  # fmt: skip
    of_h, of_b = (torch.from_numpy(x).requires_grad_() for x in (h, b))
    first, second = of_h[:, :3] @ of_b[:40].T, of_h[:, 3:6] @ of_b[40:].T
    of_y = torch.from_numpy(d_out)
    (2 * (first * of_y[:, :40]).sum() + 2 * (second * of_y[:, 56:80]).sum()).backward()
    close = {"rtol": 1e-5, "atol": 1e-5}  # other order of sums
    np.testing.assert_allclose(d_h, of_h.grad.numpy(), **close)
    np.testing.assert_allclose(d_b, of_b.grad.numpy() + accumulate * before, **close)
    assert not d_h[:, 6:].any()
