"""The references of FP8 quantization against torch, and against what rounding must satisfy."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, E4M3, E4M3_MAX, E5M2, E5M2_MAX, F32
from llmq.ref.common import FP8_NAN as NAN
from llmq.ref.quantize.quantize import quantize, quantize_transpose

LARGEST = {E4M3: E4M3_MAX, E5M2: E5M2_MAX}
TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
MANTISSA_BITS = {E4M3: 3, E5M2: 2}
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}  # subnormal


def quantized(x, abs_max, dtype):
    q, scale = np.full(x.shape, np.nan, dtype.numpy), np.full(1, np.nan, np.float32)
    quantize(q, scale, x, np.array([abs_max], np.float32), x.size)
    return q, scale[0]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("abs_max", [1e-20, 1e-10, 0.3, 5.0, 448.0, 3e38])
def test_equals_torch(rng, dtype, abs_max):
    # Numbers of all sizes, in steps of a quarter of the format's, so that there are ties.
    exponents = rng.integers(-30, 3, 100_000)
    x = np.ldexp(rng.integers(-64, 65, 100_000) / 32, exponents).astype(np.float32)
    x *= np.float32(min(abs_max, 1e37))
    q, scale = quantized(x, abs_max, dtype)
    m = max(np.float32(abs_max), np.float32(1e-10))
    largest = np.float32(LARGEST[dtype])
    assert scale == m / largest
    # Torch does not saturate.
    scaled = torch.from_numpy(x * (np.float32(1) / scale)).clamp(-float(largest), float(largest))
    want = scaled.to(TORCH[dtype]).view(torch.uint8).numpy()
    np.testing.assert_array_equal(q.view(np.uint8), want)


@pytest.mark.parametrize("source", [F32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_error_is_half_a_step(rng, dtype, source):
    x = (rng.normal(size=(400, 512)) * 10.0 ** rng.uniform(-4, 0, (400, 512))).astype(source.numpy)
    x32 = x.astype(np.float32)
    abs_max = np.abs(x32).max()
    q, scale = quantized(x, abs_max, dtype)
    assert np.abs(q.astype(np.float32)).max() == LARGEST[dtype]
    step = np.maximum(np.abs(x32) * 2.0 ** -MANTISSA_BITS[dtype], SMALLEST[dtype] * scale)
    # The scale and the product with its reciprocal are rounded to F32: a few parts in 2^24.
    assert (np.abs(q.astype(np.float32) * scale - x32) <= step / 2 * (1 + 2**-20)).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_special_values(dtype):
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1.0, 1e9], np.float32)
    largest = LARGEST[dtype]
    q, scale = quantized(x, largest, dtype)
    assert scale == 1
    assert q[:2].view(np.uint8).tolist() == [NAN, NAN] and np.isnan(q[:2]).all()
    assert q[2:].astype(np.float64).tolist() == [largest, -largest, 0, 1, largest]
    assert np.signbit(q[4])
    for abs_max in (np.nan, np.inf):  # not hidden by clamping
        q, scale = quantized(x, abs_max, dtype)
        assert np.isnan(scale) and np.isnan(q).all()
    q, scale = quantized(np.zeros(4, np.float32), 0.0, dtype)
    assert scale == np.float32(1e-10) / np.float32(largest)
    assert q.view(np.uint8).tolist() == [0] * 4


@pytest.mark.parametrize("with_q", [True, False])
def test_transpose(rng, with_q):
    x = rng.normal(size=(640, 208)).astype(np.float32)  # several blocks of rows
    abs_max = np.abs(x).max(keepdims=True)[0]
    want, want_scale = quantized(x, abs_max[0], E4M3)
    q_t, scale = np.zeros((208, 640), E4M3.numpy), np.zeros(1, np.float32)
    q = np.zeros(x.shape, E4M3.numpy) if with_q else None
    quantize_transpose(q, q_t, scale, x, abs_max, *x.shape)
    np.testing.assert_array_equal(q_t.view(np.uint8), want.T.view(np.uint8))
    assert scale[0] == want_scale
    if with_q:
        np.testing.assert_array_equal(q.view(np.uint8), want.view(np.uint8))
