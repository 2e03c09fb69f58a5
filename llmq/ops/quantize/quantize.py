"""BF16 or F32 to FP8, with one scale for the whole tensor; and the transpose of FP8 matrices."""

from llmq.base.dtypes import F32, FP8
from llmq.base.operand import CODES_MULTIPLE, Fp8Out, turned
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    ROWS_MULTIPLE,
    abs_max_consts,
    declared_fp8,
    expect_float,
    fp8_args,
    fp8_consts,
    octet_tiles,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_BLOCK = (
    4 * 8 * THREADS
)  # elements: four times eight per thread; OCTETS in cu/quantize/quantize.cu
CODES_TILE = 128  # rows and columns of transpose_codes; CodesTile in cu/fp8.cuh

QUANTIZE = Kernel(
    "quantize/quantize.cu",
    "quantize",
    args="Q* q, f32* scale, const T* x, const f32* abs_max, i64 n",
)
TRANSPOSE = Kernel(
    "quantize/quantize.cu",
    "quantize_transpose",
    args="Q*? q, Q* q_t, f32* scale, const T* x, const f32* abs_max, i64 rows, i32 cols",
)
SCALED = Kernel(
    "quantize/quantize.cu",
    "quantize_scaled",
    args="const T* x, i64 rows, i32 cols, inout f32*? abs_max, " + declared_fp8("rows", "cols"),
)
TRANSPOSE_CODES = Kernel(
    "quantize/quantize.cu", "transpose_codes", args="Q* q_t, const Q* q, i64 rows, i32 cols"
)
DEQUANTIZE = Kernel(
    "quantize/quantize.cu", "dequantize", args="T* out, const Q* q, const f32* scale, i64 n"
)


def grid(size: int) -> int:
    """Blocks to quantize this many elements in the order they lie in."""
    return ceil_div(size, PER_BLOCK)


def quantize(
    dev: Device, q: Tensor | None, q_t: Tensor | None, scale: Tensor, x: Tensor, abs_max: Tensor
) -> None:
    """q = x / scale, q_t its transpose; scale = max(abs_max, 1e-10) / MAX.

    MAX is the largest finite value of the FP8 format. Values are rounded to nearest even and
    clamped to +-MAX. Where abs_max is infinite or NaN, scale is NaN, and so is all that is computed
    with it: a clamped infinity would go on unnoticed.

    Args (Q is E4M3 or E5M2):
        q        out  Q (rows, cols)          or None; at least one of q and q_t
        q_t      out  Q turned((rows, cols))  or None; rows a multiple of 4
        scale    out  F32 (1,)
        x        in   BF16 or F32 (rows, cols), cols a multiple of 16; without q_t also (n,), a part
                      of a matrix in the order it lies in, n a multiple of 16
        abs_max  in   F32 (1,)                largest |x|
    """
    _check(q, q_t, scale, x, abs_max)
    if q_t is None:
        dev.launch(QUANTIZE, grid(x.size), THREADS, (q, scale, x, abs_max, x.size))
    else:
        args = (q, q_t, scale, x, abs_max, *x.shape)
        dev.launch(TRANSPOSE, octet_tiles("quantize", *x.shape), THREADS, args)


def scaled(dev: Device, x: Tensor, fp8: Fp8Out, *, abs_max: Tensor | None = None) -> None:
    """x in FP8 with a scale that is known beforehand, as Fp8Out has it.

    Args:
        x        in     BF16 or F32 (rows, cols)  multiples of 4 and 16
        fp8      out    (rows, cols)
        abs_max  inout  F32 (1,)                  or None; raised to the largest |x|
    """
    expect_float("quantize", "x", x)
    _check_shape("x", x, (2,))
    fp8_consts("quantize", fp8, *x.shape)  # the kernel goes by null pointers
    dev.launch(
        SCALED,
        octet_tiles("quantize", *x.shape),
        THREADS,
        (x, *x.shape, abs_max, *fp8_args(fp8)),
        consts=abs_max_consts(abs_max),
    )


def transpose(dev: Device, q_t: Tensor, q: Tensor) -> None:
    """q_t = the transpose of q, or of each of E matrices.

    Args (Q is E4M3 or E5M2):
        q_t  out  Q turned((rows, cols))              or (E, *turned)
        q    in   Q (rows, cols), multiples of 4, 16  or (E, rows, cols)
    """
    if q.dtype not in FP8:
        raise TypeError(f"quantize: q must be E4M3 or E5M2, got {q.dtype.label}")
    *outer, rows, cols = q.shape
    _check_shape("q", q.rows(0, 1).view(rows, cols) if len(outer) == 1 else q, (2,))
    expect("quantize", "q_t", q_t, q.dtype, (*outer, *turned((rows, cols))))
    blocks = (ceil_div(cols, CODES_TILE), ceil_div(rows, CODES_TILE), *outer)
    dev.launch(TRANSPOSE_CODES, blocks, THREADS, (q_t, q, rows, cols))


def dequantize(dev: Device, out: Tensor, q: Tensor, scale: Tensor) -> None:
    """out = q * scale, computed in F32.

    Args (Q is E4M3 or E5M2):
        out    out  BF16 or F32 (n,)   n a multiple of 16
        q      in   Q (n,)
        scale  in   F32 (1,)
    """
    expect_float("quantize", "out", out)
    _check_shape("out", out, (1,))
    if q.dtype not in FP8:
        raise TypeError(f"quantize: q must be E4M3 or E5M2, got {q.dtype.label}")
    expect("quantize", "q", q, None, out.shape)
    expect("quantize", "scale", scale, F32, (1,))
    blocks = ceil_div(out.size, 16 * THREADS)
    dev.launch(DEQUANTIZE, blocks, THREADS, (out, q, scale, out.size))


def _check(q: Tensor | None, q_t: Tensor | None, scale: Tensor, x: Tensor, abs_max: Tensor) -> None:
    expect_float("quantize", "x", x)
    _check_shape("x", x, (1, 2) if q_t is None else (2,))
    if q is None and q_t is None:
        raise TypeError("quantize: q or q_t must be a tensor, both are None")
    dtype = None  # of both
    for name, tensor, shape in (("q", q, x.shape), ("q_t", q_t, q_t and turned(x.shape))):
        if tensor is not None:
            expect("quantize", name, tensor, dtype, shape)
            dtype = tensor.dtype
            if dtype not in FP8:
                raise TypeError(f"quantize: {name} must be E4M3 or E5M2, got {dtype.label}")
    expect("quantize", "scale", scale, F32, (1,))
    expect("quantize", "abs_max", abs_max, F32, (1,))


def _check_shape(name: str, tensor: Tensor, dimensions: tuple[int, ...]) -> None:
    shape = tensor.shape
    multiples = (ROWS_MULTIPLE, CODES_MULTIPLE)[-len(shape) :]
    if len(shape) not in dimensions or any(
        n % multiple or n <= 0 for n, multiple in zip(shape, multiples, strict=True)
    ):
        wanted = " or ".join({1: "(n,)", 2: "(rows, cols)"}[n] for n in dimensions)
        raise ValueError(
            f"quantize: {name} must be {wanted}, in multiples of {ROWS_MULTIPLE} rows and "
            f"{CODES_MULTIPLE} others, got {shape}"
        )
