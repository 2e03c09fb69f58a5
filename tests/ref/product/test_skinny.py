"""The reference of products of few rows against torch."""

import numpy as np
import torch

from llmq.ref.product.skinny import skinny


def test_equals_torch(rng):
    a, b, addend = (
        rng.normal(size=shape).astype(np.float32) for shape in ((3, 40), (7, 40), (3, 7))
    )
    bias, out = rng.normal(size=7).astype(np.float32), np.empty_like(addend)
    skinny(out, a, b, bias, addend, 3, 7, 40, 0.5)
    x, weight = torch.from_numpy(a) * 0.5, torch.from_numpy(b)
    want = torch.nn.functional.linear(x, weight, torch.from_numpy(bias)) + torch.from_numpy(addend)
    np.testing.assert_allclose(out, want, atol=1e-5)
