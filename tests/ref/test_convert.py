"""Reference of the conversion against torch."""

import numpy as np
import torch

from llmq.base.dtypes import BF16
from llmq.ref.convert import convert


def test_to_bf16_rounds_as_torch_does(rng):
    x = rng.integers(0, 2**32, 10000, dtype=np.uint32).view(np.float32)  # every kind of number
    special = np.array([np.inf, -np.inf, np.nan, 0, -0.0, 3.4e38, 1e-40], np.float32)
    x = np.concatenate([x, special])
    out = np.zeros(x.size, BF16.numpy)
    with np.errstate(over="ignore", invalid="ignore"):
        convert(out, x, x.size)
    want = torch.from_numpy(x).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(out.astype(np.float32), want)


def test_to_f32_is_exact():
    x = np.arange(2**16, dtype=np.uint16).view(BF16.numpy)
    out = np.zeros(x.size, np.float32)
    convert(out, x, x.size)
    np.testing.assert_array_equal(
        out, torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).float()
    )
