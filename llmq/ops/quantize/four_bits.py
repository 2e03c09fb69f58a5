"""NF4: 4-bit codes of weights, a scale for each 64 weights, and 8-bit codes of the scales.

A matrix, in memory order, is cut into blocks of 64 elements. A block's scale is its largest
absolute value. A code stands for one of 16 levels between -1 and 1; a byte holds two codes. The
scales of a matrix, minus their mean, are quantized in the same way in groups of 256, with 256
levels. This is the QLoRA paper's format (Dettmers et al., 2023) with bitsandbytes' codes.
"""

from llmq.base.tensor import Tensor
from llmq.ref.quantize.four_bits import BLOCK, GROUP
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
PER_THREAD, DECODED = 8, 16  # elements that a thread encodes and decodes
NUM_LEVELS = 256  # number of levels for the codes of scales

_OF_MODULES = (
    "u8[M*n//2] codes, u8[M*n//64] scale_codes, f32[M*((n//64 + 255)//256)] groups, f32[M] mean, "
    "f32[256] levels, i64 n"
)
QUANTIZE = Kernel(
    "quantize/four_bits.cu",
    "nf4_quantize",
    "out u8[n//2] codes, out f32[n//64] scales, T[n] x, i64 n",
    where="n % 64",
)
QUANTIZE_SCALES = Kernel(
    "quantize/four_bits.cu",
    "nf4_quantize_scales",
    "out u8[count] codes, out f32[(count + 255)//256] groups, f32[count] scales, f32[1] mean, "
    "f32[256] levels, i64 count",
)
DECODE = Kernel(
    "quantize/four_bits.cu", "nf4_decode", f"out T[M*n] out, {_OF_MODULES}", where="n % 64"
)
DECODE_FP8 = Kernel(
    "quantize/four_bits.cu",
    "nf4_decode_fp8",
    f"out e4m3[M*n] out, f32[1] scale, {_OF_MODULES}",
    where="n % 64",
)


def sizes(n: int) -> tuple[int, int, int]:
    """Return (bytes of codes, number of blocks, number of groups) of n elements."""
    return n // 2, n // BLOCK, ceil_div(n // BLOCK, GROUP)


def quantize(dev: Device, codes: Tensor, scales: Tensor, x: Tensor) -> None:
    """Write the codes of x and the scales, the largest |x| of each block. A byte holds the codes of
    two neighbours, the first in the higher bits."""
    dev.launch(QUANTIZE, _blocks(x.size), THREADS, (codes, scales, x, x.size))


def quantize_scales(
    dev: Device, codes: Tensor, groups: Tensor, scales: Tensor, mean: Tensor, levels: Tensor
) -> None:
    """Write the codes of scales, and for each group the scale of these codes.

    groups: out, the largest |scale - mean| of each group. mean: mean of the matrix's scales.
    levels: ref.four_bits.scale_levels().
    """
    count = scales.size
    args = (codes, groups, scales, mean, levels, count)
    dev.launch(QUANTIZE_SCALES, ceil_div(count, GROUP), GROUP, args)


def decode(
    dev: Device,
    out: Tensor,
    codes: Tensor,
    scale_codes: Tensor,
    groups: Tensor,
    mean: Tensor,
    levels: Tensor,
    fp8_scale: Tensor | None = None,
) -> None:
    """Write decoded values to out, rounded to out's dtype. An E4M3 out gets values / fp8_scale.

    Modules of one size follow one another, each with its own groups and mean. fp8_scale: F32 (1,)
    if out is E4M3, else None.

    Cost:    half a byte read per element, out written; one launch.
    """
    count, n = mean.size, out.size // mean.size
    args = (codes, scale_codes, groups, mean, levels, n)
    grid = (ceil_div(n, THREADS * DECODED), count)
    if fp8_scale is None:
        dev.launch(DECODE, grid, THREADS, (out, *args))
    else:
        dev.launch(DECODE_FP8, grid, THREADS, (out, fp8_scale, *args))


def _blocks(n: int) -> int:
    return ceil_div(n, THREADS * PER_THREAD)


# -- MXFP4: a 4-bit code for each weight, and a power of two for 32 weights
# (`ref/quantize/four_bits.py`)
#
# Encoding decoded values gives the same codes, so that files of such codes are kept without loss.

ENCODE_MXFP4 = Kernel(
    "quantize/four_bits.cu",
    "mxfp4_encode",
    "out u8[n//2] codes, out u8[n//32] exponents, T[*n] x, i64 n",
    where="n % 32",
)
DECODE_MXFP4 = Kernel(
    "quantize/four_bits.cu",
    "mxfp4_decode",
    "out T[*n] out, u8[n//2] codes, u8[n//32] exponents, i64 n",
    where="n % 32",
)


def encode_mxfp4(dev: Device, codes: Tensor, exponents: Tensor, x: Tensor) -> None:
    """Write the codes of x and the exponents of its blocks. A byte holds the codes of two
    neighbours, the first in the lower bits. x: finite."""
    dev.launch(ENCODE_MXFP4, _blocks(x.size), THREADS, (codes, exponents, x, x.size))


def decode_mxfp4(dev: Device, out: Tensor, codes: Tensor, exponents: Tensor) -> None:
    """Write the values of codes to out."""
    dev.launch(DECODE_MXFP4, _blocks(out.size), THREADS, (out, codes, exponents, out.size))
