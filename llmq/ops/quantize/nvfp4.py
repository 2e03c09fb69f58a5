"""NVFP4: 4-bit codes of weights (E2M1), an E4M3 scale for 16 weights, an F32 factor per module.

A module, in memory order, is cut into blocks of 16 elements. NVIDIA's published checkpoints have
this format; `ref/quantize/nvfp4.py` has the rule for scales and factors.
"""

from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
PER_THREAD, DECODED = 8, 16  # elements that a thread encodes and decodes

ENCODE = Kernel(
    "quantize/nvfp4.cu",
    "nvfp4_encode",
    "out u8[n//2] codes, out e4m3[n//16] scales, out f32[1] factor, T[n] x, f32[1] abs_max, i64 n",
    where="n % 16",
)
DECODE = Kernel(
    "quantize/nvfp4.cu",
    "nvfp4_decode",
    "out T[M*n] out, u8[M*n//2] codes, e4m3[M*n//16] scales, f32[M] factors, i64 n",
    where="n % 16",
)


def encode(
    dev: Device, codes: Tensor, scales: Tensor, factor: Tensor, x: Tensor, abs_max: Tensor
) -> None:
    """Write the codes of a module x, the scales of its blocks, and the module's factor. A byte
    holds the codes of two neighbours, the first in the lower bits. abs_max: F32 (1,), the module's
    largest |x|, from which the factor follows."""
    args = (codes, scales, factor, x, abs_max, x.size)
    dev.launch(ENCODE, ceil_div(x.size, THREADS * PER_THREAD), THREADS, args)


def decode(dev: Device, out: Tensor, codes: Tensor, scales: Tensor, factors: Tensor) -> None:
    """Write decoded values to out, rounded to out's dtype. Modules of one size follow one another,
    each with its own factor.

    Cost:    9/16 byte read per element, out written; one launch.
    """
    n = out.size // factors.size
    grid = ceil_div(n, THREADS * DECODED), factors.size
    dev.launch(DECODE, grid, THREADS, (out, codes, scales, factors, n))
