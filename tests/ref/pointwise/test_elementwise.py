"""References of operations on each element, against torch."""

import numpy as np
import torch

from llmq.base.dtypes import BF16
from llmq.ref.pointwise.elementwise import add, convert, fill


def test_sums_round_as_torch_does(rng):
    a, b = (rng.normal(size=1000).astype(np.float32) for _ in range(2))
    out = np.zeros(1000, np.float32)
    add(out, a, b, 1000)
    np.testing.assert_array_equal(out, a + b)
    narrow = np.zeros(1000, BF16.numpy)
    add(narrow, a.astype(BF16.numpy), b.astype(BF16.numpy), 1000)
    want = (torch.from_numpy(a).bfloat16() + torch.from_numpy(b).bfloat16()).float().numpy()
    np.testing.assert_array_equal(narrow.astype(np.float32), want)


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


def test_a_value_that_fills_is_rounded_to_the_dtype():
    for dtype, want in ((np.float32, np.float32(0.1)), (BF16.numpy, 0.10009765625)):
        x = np.full((3, 5), np.nan, dtype)
        fill(x, 0.1, 15)
        np.testing.assert_array_equal(x.astype(np.float32), np.float32(want))
