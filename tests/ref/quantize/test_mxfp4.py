"""References of MXFP4: what transformers decodes, and codes that are nearest."""

import numpy as np
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmq.base.dtypes import BF16
from llmq.ref.quantize import four_bits as ref


def test_values_are_those_of_transformers_and_encode_to_themselves(rng):
    """Some blocks have no code of 4 or more, and some powers are far from 1."""
    codes = rng.integers(0, 256, (3, 4, 5, 16), np.uint8)
    codes[0, 0] &= 0x33  # at most 1.5
    codes[0, 1] = 0
    exponents = rng.integers(20, 230, (3, 4, 5), np.uint8)
    want = convert_moe_packed_tensors(torch.tensor(codes), torch.tensor(exponents))
    want = want.transpose(1, 2).float().numpy()
    values = np.empty(3 * 4 * 160, BF16.numpy)
    ref.mxfp4_decode(values, codes.reshape(-1), exponents.reshape(-1), values.size)
    np.testing.assert_array_equal(values.astype(np.float32).reshape(want.shape), want)
    again, own = np.empty(values.size // 2, np.uint8), np.empty(values.size // 32, np.uint8)
    ref.mxfp4_encode(again, own, values, values.size)
    back = np.empty_like(values)
    ref.mxfp4_decode(back, again, own, values.size)
    np.testing.assert_array_equal(back, values)


def test_codes_are_the_nearest_ones(rng):
    x = np.append(rng.normal(size=32 * 30), np.linspace(-6, 6, 32)).astype(np.float32)
    codes, exponents = np.empty(x.size // 2, np.uint8), np.empty(x.size // 32, np.uint8)
    ref.mxfp4_encode(codes, exponents, x, x.size)
    got = np.empty_like(x)
    ref.mxfp4_decode(got, codes, exponents, x.size)
    power = np.repeat(np.exp2(exponents.astype(np.float32) - ref.MXFP4_BIAS), 32)
    grid = np.concatenate([ref.MXFP4_LEVELS, -ref.MXFP4_LEVELS])
    error = np.abs(x[:, None] - grid * power[:, None]).min(axis=1)
    np.testing.assert_array_equal(np.abs(got - x), error)
    largest = np.abs(x).reshape(-1, 32).max(axis=1) / power[::32]
    assert (largest > 3).all() and (largest <= 6).all()
