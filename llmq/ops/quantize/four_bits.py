"""NF4: four bits for each weight, a scale for 64 of them, and for the scales eight bits each.

A matrix, in the order it lies in, is cut into blocks of 64 elements. A block is a scale, its
largest absolute value, times levels between -1 and 1, of which there are 16; two codes are a byte.
The scales of a matrix, less their mean, are quantized in the same way in groups of 256, with 256
levels. This is the QLoRA paper's format (Dettmers et al., 2023); codes are those of bitsandbytes.
"""

from llmq.base.dtypes import E4M3, F32, U8
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.ref.quantize.four_bits import BLOCK, GROUP, MXFP4_BLOCK
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_THREAD, DECODED = 8, 16  # elements that a thread encodes, and decodes
NUM_LEVELS = 256  # of scales

_SCALES = "const u8* scale_codes, const f32* groups, const f32* mean, const f32* levels"
QUANTIZE = Kernel(
    "quantize/four_bits.cu", "nf4_quantize", args="u8* codes, f32* scales, const T* x, i64 n"
)
QUANTIZE_SCALES = Kernel(
    "quantize/four_bits.cu",
    "nf4_quantize_scales",
    args="u8* codes, f32* groups, const f32* scales, const f32* mean, const f32* levels, i64 count",
)
DECODE = Kernel(
    "quantize/four_bits.cu", "nf4_decode", args=f"T* out, const u8* codes, {_SCALES}, i64 n"
)
DECODE_FP8 = Kernel(
    "quantize/four_bits.cu",
    "nf4_decode_fp8",
    args=f"e4m3* out, const f32* scale, const u8* codes, {_SCALES}, i64 n",
)


def sizes(n: int) -> tuple[int, int, int]:
    """Bytes of the codes of n elements, blocks, groups."""
    return n // 2, n // BLOCK, ceil_div(n // BLOCK, GROUP)


def quantize(dev: Device, codes: Tensor, scales: Tensor, x: Tensor) -> None:
    """The codes of x, and the largest |x| of each block.

    Args:
        codes   out  U8 (n/2,)          of two neighbours each, the first one in the higher bits
        scales  out  F32 (n/64,)
        x       in   BF16 or F32 (n,)   n a multiple of 64
    """
    expect_float("nf4", "x", x)
    _check_count("x", x)
    expect("nf4", "codes", codes, U8, (x.size // 2,))
    expect("nf4", "scales", scales, F32, (x.size // BLOCK,))
    dev.launch(QUANTIZE, _blocks(x.size), THREADS, (codes, scales, x, x.size))


def quantize_scales(
    dev: Device, codes: Tensor, groups: Tensor, scales: Tensor, mean: Tensor, levels: Tensor
) -> None:
    """The codes of scales, and a scale of these for each group.

    Args:
        codes   out  U8 (m,)
        groups  out  F32 (ceil(m/256),)  the largest |scale - mean|
        scales  in   F32 (m,)
        mean    in   F32 (1,)            of all scales of the matrix
        levels  in   F32 (256,)          ref.four_bits.scale_levels()
    """
    count = scales.size
    expect("nf4", "scales", scales, F32, (count,))
    expect("nf4", "codes", codes, U8, (count,))
    expect("nf4", "groups", groups, F32, (ceil_div(count, GROUP),))
    expect("nf4", "mean", mean, F32, (1,))
    expect("nf4", "levels", levels, F32, (NUM_LEVELS,))
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
    """out = what the codes stand for, rounded to its format; in FP8 divided by fp8_scale before.

    Modules of the same size follow each other, each with groups and a mean of its own.

    Args (M modules of n elements):
        out          out  BF16 or F32 (M*n,); E4M3 with fp8_scale
        codes        in   U8 (M*n/2,)
        scale_codes  in   U8 (M*n/64,)
        groups       in   F32 (M*ceil(n/64/256),)
        mean         in   F32 (M,)
        levels       in   F32 (256,)
        fp8_scale    in   F32 (1,)    or None

    Cost:    half a byte read, out written; one launch.
    """
    count, n = mean.size, out.size // mean.size
    _check_count("out", out, count)
    half, blocks, num_groups = sizes(n)
    expect("nf4", "codes", codes, U8, (count * half,))
    expect("nf4", "scale_codes", scale_codes, U8, (count * blocks,))
    expect("nf4", "groups", groups, F32, (count * num_groups,))
    expect("nf4", "mean", mean, F32, (count,))
    expect("nf4", "levels", levels, F32, (NUM_LEVELS,))
    args, grid = (
        (codes, scale_codes, groups, mean, levels, n),
        (ceil_div(n, THREADS * DECODED), count),
    )
    if fp8_scale is None:
        expect_float("nf4", "out", out)
        dev.launch(DECODE, grid, THREADS, (out, *args))
    else:
        expect("nf4", "out", out, E4M3, out.shape)
        expect("nf4", "fp8_scale", fp8_scale, F32, (1,))
        dev.launch(DECODE_FP8, grid, THREADS, (out, fp8_scale, *args))


def _blocks(n: int) -> int:
    return ceil_div(n, THREADS * PER_THREAD)


def _check_count(name: str, tensor: Tensor, modules: int = 1) -> None:
    if len(tensor.shape) != 1 or tensor.size % (modules * BLOCK):
        raise ValueError(
            f"nf4: {name} must be (n,), n a multiple of {modules * BLOCK}, got shape {tensor.shape}"
        )


# -- MXFP4: four bits for each weight, and a power of two for 32 of them
# (`ref/quantize/four_bits.py`)
#
# Values that were decoded are encoded again to the same ones: files of such codes lose nothing.

ENCODE_MXFP4 = Kernel(
    "quantize/four_bits.cu", "mxfp4_encode", args="u8* codes, u8* exponents, const T* x, i64 n"
)
DECODE_MXFP4 = Kernel(
    "quantize/four_bits.cu",
    "mxfp4_decode",
    args="T* out, const u8* codes, const u8* exponents, i64 n",
)


def encode_mxfp4(dev: Device, codes: Tensor, exponents: Tensor, x: Tensor) -> None:
    """The codes of x, and the exponents of its blocks.

    Args:
        codes      out  U8 (n/2,)          of two neighbours each, the first one in the lower bits
        exponents  out  U8 (n/32,)
        x          in   BF16 or F32 (n,)   finite; n a multiple of 32
    """
    _launch_mxfp4(dev, ENCODE_MXFP4, "x", x, codes, exponents, (codes, exponents, x))


def decode_mxfp4(dev: Device, out: Tensor, codes: Tensor, exponents: Tensor) -> None:
    """The values of codes. Args as encode_mxfp4's, but out is written, and the others are read."""
    _launch_mxfp4(dev, DECODE_MXFP4, "out", out, codes, exponents, (out, codes, exponents))


def _launch_mxfp4(
    dev: Device,
    kernel: Kernel,
    name: str,
    wide: Tensor,
    codes: Tensor,
    exponents: Tensor,
    args: tuple[Tensor, ...],
) -> None:
    op, n = kernel.entry, wide.size
    expect_float(op, name, wide)
    if n % MXFP4_BLOCK:
        raise ValueError(f"{op}: {name} must be a multiple of {MXFP4_BLOCK} elements, got {n}")
    expect(op, "codes", codes, U8, (n // 2,))
    expect(op, "exponents", exponents, U8, (n // MXFP4_BLOCK,))
    dev.launch(kernel, ceil_div(n, THREADS * PER_THREAD), THREADS, (*args, n))
