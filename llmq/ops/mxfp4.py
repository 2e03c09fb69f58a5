"""MXFP4: four bits for each weight, and a power of two for 32 of them; `ref/mxfp4.py` says which.

Values that were decoded are encoded again to the same ones: files of such codes lose nothing.
"""

from llmq.base.dtypes import U8
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.ref.mxfp4 import BLOCK
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_THREAD = 8  # elements

ENCODE = Kernel("mxfp4.cu", "mxfp4_encode", args="u8* codes, u8* exponents, const T* x, i64 n")
DECODE = Kernel(
    "mxfp4.cu", "mxfp4_decode", args="T* out, const u8* codes, const u8* exponents, i64 n"
)


def encode(dev: Device, codes: Tensor, exponents: Tensor, x: Tensor) -> None:
    """The codes of x, and the exponents of its blocks.

    Args:
        codes      out  U8 (n/2,)          of two neighbours each, the first one in the lower bits
        exponents  out  U8 (n/32,)
        x          in   BF16 or F32 (n,)   finite; n a multiple of 32
    """
    _launch(dev, ENCODE, "x", x, codes, exponents, (codes, exponents, x))


def decode(dev: Device, out: Tensor, codes: Tensor, exponents: Tensor) -> None:
    """The values of codes. Args as encode's, but out is written, and the others are read."""
    _launch(dev, DECODE, "out", out, codes, exponents, (out, codes, exponents))


def _launch(
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
    if n % BLOCK:
        raise ValueError(f"{op}: {name} must be a multiple of {BLOCK} elements, got {n}")
    expect(op, "codes", codes, U8, (n // 2,))
    expect(op, "exponents", exponents, U8, (n // BLOCK,))
    dev.launch(kernel, ceil_div(n, THREADS * PER_THREAD), THREADS, (*args, n))
