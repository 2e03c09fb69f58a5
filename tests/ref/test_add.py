"""Reference of the sum of two tensors against torch."""

import numpy as np
import torch

from llmq.base.dtypes import BF16
from llmq.ref.add import add


def test_rounds_as_torch_does(rng):
    a, b = (rng.normal(size=1000).astype(np.float32) for _ in range(2))
    out = np.zeros(1000, np.float32)
    add(out, a, b, 1000)
    np.testing.assert_array_equal(out, a + b)
    narrow = np.zeros(1000, BF16.numpy)
    add(narrow, a.astype(BF16.numpy), b.astype(BF16.numpy), 1000)
    want = (torch.from_numpy(a).bfloat16() + torch.from_numpy(b).bfloat16()).float().numpy()
    np.testing.assert_array_equal(narrow.astype(np.float32), want)
