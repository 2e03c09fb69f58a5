"""Conversion of BF16 or F32 to FP8 with one scale for the whole tensor, and transposition of FP8
matrices."""

from llmq.base.operand import Fp8Out
from llmq.base.tensor import Tensor
from llmq.ops.common import abs_max_consts, declared_fp8, fp8_args, fp8_consts, octet_tiles
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
PER_BLOCK = 4 * 8 * THREADS  # elements of a block: OCTETS * 8 per thread, as in quantize.cu
CODES_TILE = 128  # rows and columns of a tile of transpose_codes; CodesTile in cu/fp8.cuh

_MATRIX = "rows % 4, rows >= 1, cols % 16, cols >= 1"
QUANTIZE = Kernel(
    "quantize/quantize.cu",
    "quantize",
    "out Q[*rows,cols] q, out f32[1] scale, T[*rows,cols] x, f32[1] abs_max, i64 n",
    where="cols % 16, n >= 1",
)
TRANSPOSE = Kernel(
    "quantize/quantize.cu",
    "quantize_transpose",
    "out Q[rows,cols]? q, out Q[cols,padded(rows)] q_t, out f32[1] scale, T[rows,cols] x, "
    "f32[1] abs_max, i64 rows, i32 cols",
    where=_MATRIX,
)
SCALED = Kernel(
    "quantize/quantize.cu",
    "quantize_scaled",
    "T[rows,cols] x, i64 rows, i32 cols, inout f32[1]? abs_max, " + declared_fp8("rows", "cols"),
    where=_MATRIX,
)
TRANSPOSE_CODES = Kernel(
    "quantize/quantize.cu",
    "transpose_codes",
    "out Q[*matrices,cols,padded(rows)] q_t, Q[*matrices,rows,cols] q, i64 rows, i32 cols",
    where=_MATRIX,
)
DEQUANTIZE = Kernel(
    "quantize/quantize.cu",
    "dequantize",
    "out T[n] out, Q[n] q, f32[1] scale, i64 n",
    where="n % 16, n >= 1",
)


def grid(size: int) -> int:
    """Return the number of thread blocks that quantize `size` elements in memory order."""
    return ceil_div(size, PER_BLOCK)


def quantize(
    dev: Device, q: Tensor | None, q_t: Tensor | None, scale: Tensor, x: Tensor, abs_max: Tensor
) -> None:
    """Set q = x / scale and q_t to the transpose of q, with scale = max(abs_max, 1e-10) / MAX.

    MAX is the largest finite value of the FP8 dtype. Values are rounded to nearest even and clamped
    to +-MAX. If abs_max is infinite or NaN, scale is NaN, so that later code notices a clamped
    infinity.

    scale: out. abs_max: the largest |x|. One of q and q_t may be None. Without q_t, x may be any
    contiguous part of a matrix.
    """
    if q_t is None:
        dev.launch(QUANTIZE, grid(x.size), THREADS, (q, scale, x, abs_max, x.size))
    else:
        rows, cols = TRANSPOSE.dims(x=x)
        args = (q, q_t, scale, x, abs_max, rows, cols)
        dev.launch(TRANSPOSE, octet_tiles(rows, cols), THREADS, args)


def scaled(dev: Device, x: Tensor, fp8: Fp8Out, *, abs_max: Tensor | None = None) -> None:
    """Write x in FP8 with a scale that is known beforehand, see Fp8Out. abs_max: raised to the
    largest |x|; None: not recorded."""
    rows, cols = SCALED.dims(x=x)
    fp8_consts("quantize", fp8, rows, cols)  # the kernel reads null pointers itself
    dev.launch(
        SCALED,
        octet_tiles(rows, cols),
        THREADS,
        (x, rows, cols, abs_max, *fp8_args(fp8)),
        consts=abs_max_consts(abs_max),
    )


def transpose(dev: Device, q_t: Tensor, q: Tensor) -> None:
    """Set q_t to the transpose of q, or to the transpose of each matrix in q (..., rows, cols)."""
    _, rows, cols = TRANSPOSE_CODES.dims(q=q)
    blocks = (ceil_div(cols, CODES_TILE), ceil_div(rows, CODES_TILE), *q.shape[:-2])
    dev.launch(TRANSPOSE_CODES, blocks, THREADS, (q_t, q, rows, cols))


def dequantize(dev: Device, out: Tensor, q: Tensor, scale: Tensor) -> None:
    """Set out = q * scale, computed in F32."""
    blocks = ceil_div(out.size, 16 * THREADS)
    dev.launch(DEQUANTIZE, blocks, THREADS, (out, q, scale, out.size))
