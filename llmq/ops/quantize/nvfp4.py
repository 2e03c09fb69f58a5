"""NVFP4: 4-bit codes of weights (E2M1), a scale (E4M3) for each 16, and an F32 factor of a module.

A module, in memory order, is cut into blocks of 16 elements. This is the format of NVIDIA's
published checkpoints; `ref/quantize/nvfp4.py` has its rule.
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
    """Write the codes of x, two neighbours a byte, the first in the lower bits; the scales of its
    blocks; and the factor of the module, which follows from abs_max, its largest |x|."""
    args = (codes, scales, factor, x, abs_max, x.size)
    dev.launch(ENCODE, ceil_div(x.size, THREADS * PER_THREAD), THREADS, args)


def decode(dev: Device, out: Tensor, codes: Tensor, scales: Tensor, factors: Tensor) -> None:
    """Write the decoded values to out, rounded to its dtype. Modules of one size follow one
    another, each with its factor.

    Cost:    9/16 byte read for each element, out written; one launch.
    """
    n = out.size // factors.size
    grid = ceil_div(n, THREADS * DECODED), factors.size
    dev.launch(DECODE, grid, THREADS, (out, codes, scales, factors, n))
