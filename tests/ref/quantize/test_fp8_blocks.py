"""References of FP8 codes in blocks: torch's values, and codes to rounding."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import E4M3
from llmq.ref.quantize import fp8_blocks as ref


@pytest.mark.parametrize("rows, columns", [(128, 128), (200, 176), (3, 16)])
def test_values_are_those_of_torch(rng, rows, columns):
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    x[:2] = 0
    shape = -(-rows // 128), -(-columns // 128)
    codes, scales = np.empty(x.shape, E4M3.numpy), np.empty(shape[0] * shape[1], np.float32)
    ref.fp8_blocks_encode(codes, scales, x, rows, columns)
    spread = torch.from_numpy(scales).view(shape)
    spread = spread.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    out = np.empty((1, rows, columns), np.float32)
    ref.fp8_blocks_decode(out, codes[None], scales, rows, columns)
    want = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn).float() * spread
    np.testing.assert_array_equal(out[0], want.numpy())
    theirs = (torch.from_numpy(x) / spread).to(torch.float8_e4m3fn).float()
    assert (theirs * spread != want).float().mean() < 1e-2  # a quotient and a product differ
    np.testing.assert_allclose(out[0], x, rtol=2**-4, atol=2**-9 * scales.max())
