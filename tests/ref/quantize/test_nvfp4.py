"""References of NVFP4: the values and nearly all codes of compressed-tensors, and nearest codes."""

import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from llmq.base.dtypes import E4M3
from llmq.ref.quantize import nvfp4 as ref

SCHEME = QuantizationScheme(targets=["Linear"], **NVFP4A16)


def encoded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes, scales = np.empty(x.size // 2, np.uint8), np.empty(x.size // 16, E4M3.numpy)
    factor, x = np.empty(1, np.float32), x.reshape(-1)
    ref.nvfp4_encode(codes, scales, factor, x, np.abs(x).max(keepdims=True), x.size)
    return codes, scales, factor


def decoded(codes: np.ndarray, scales: np.ndarray, factors: np.ndarray) -> np.ndarray:
    out = np.empty(2 * codes.size, np.float32)
    ref.nvfp4_decode(out, codes, scales, factors, out.size // factors.size)
    return out


def test_values_are_those_of_compressed_tensors(rng):
    """Its factor is a divisor: the last bit of a value may differ."""
    codes = rng.integers(0, 256, (24, 32), np.uint8)
    scales = torch.from_numpy(rng.random((24, 4), np.float32) * 448).to(torch.float8_e4m3fn)
    divisor = np.array([1234.5], np.float32)
    levels = unpack_fp4_from_uint8(torch.from_numpy(codes), 24, 64, torch.float32)
    args = {"args": SCHEME.weights, "global_scale": torch.from_numpy(divisor)}
    want = dequantize(levels, scales.float(), dtype=torch.float32, **args).numpy()
    own = scales.view(torch.uint8).numpy().view(E4M3.numpy)
    found = decoded(codes.reshape(-1), own.reshape(-1), 1 / divisor).reshape(want.shape)
    np.testing.assert_allclose(found, want, rtol=2**-22)


def test_codes_are_those_of_compressed_tensors(rng):
    """But where a quotient is rounded to the other side of an edge."""
    x = torch.from_numpy(rng.normal(0, 0.02, (64, 128)).astype(np.float32))
    weights = SCHEME.weights
    divisor = generate_gparam(x.min(), x.max())
    blocks = x.reshape(64, -1, 16)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights, divisor)
    stored = {"weight": x, "weight_scale": scale, "weight_global_scale": divisor}
    made = NVFP4PackedCompressor.compress(stored, SCHEME)
    codes, scales, factor = encoded(x.numpy())
    assert factor[0] == np.float32(1 / divisor.item())
    theirs = made["weight_scale"].view(torch.uint8).numpy().reshape(-1)
    assert (scales.view(np.uint8) != theirs).mean() < 1e-3
    assert (codes != made["weight_packed"].numpy().reshape(-1)).mean() < 1e-3


def test_codes_are_the_nearest_ones(rng):
    """Blocks of zeros and of tiny numbers too."""
    x = rng.normal(size=16 * 40).astype(np.float32)
    x[:16], x[16:32], x[32:48] = 0, x[16:32] * 1e-6, np.linspace(-6, 6, 16)
    codes, scales, factor = encoded(x)
    found = decoded(codes, scales, factor)
    step = np.repeat(scales.astype(np.float32) * factor, 16)
    grid = np.concatenate([ref.MXFP4_LEVELS, -ref.MXFP4_LEVELS])
    error = np.abs(x[:, None] - grid * step[:, None]).min(axis=1)
    np.testing.assert_allclose(np.abs(found - x), error, rtol=1e-4, atol=1e-8)
    assert not found[:16].any()
    largest = np.abs(x).reshape(-1, 16).max(axis=1)[2:] / step[32::16]
    assert (largest > 5.6).all() and (largest < 6.4).all()
