"""GELU with the tanh approximation: the activation of GPT-2 (Hugging Face's gelu_new)."""

from llmq.base.operand import Fp8Out
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    AGAIN_ARGS,
    FP8_ARGS,
    NOT_AGAIN,
    VECTOR_BYTES,
    abs_max_consts,
    again_args,
    again_consts,
    expect_float,
    expect_multiple,
    fp8_args,
    fp8_consts,
    octet_tiles,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
VECTORS = 2  # 16-byte vectors per thread; VECTORS in cu/pointwise/gelu.cu

FORWARD = Kernel(
    "pointwise/gelu.cu", "gelu_forward", args="T* out, const T* x, i64 n, inout f32*? abs_max"
)
BACKWARD = Kernel(
    "pointwise/gelu.cu",
    "gelu_backward",
    args="T* d_x, const T* d_out, const T* x, i64 n, inout f32*? abs_max, T*? out",
)
FORWARD_FP8 = Kernel(
    "pointwise/gelu.cu",
    "gelu_forward_fp8",
    args="T*? out, const T* x, i64 rows, i32 columns, inout f32*? abs_max, " + FP8_ARGS,
)
BACKWARD_FP8 = Kernel(
    "pointwise/gelu.cu",
    "gelu_backward_fp8",
    args="T*? d_x, const T* d_out, const T* x, i64 rows, i32 columns, inout f32*? abs_max, "
    f"{FP8_ARGS}, {AGAIN_ARGS}",
)


def grid(size: int, itemsize: int) -> int:
    """Blocks for `size` elements: every thread handles VECTORS vectors of 16 bytes."""
    return ceil_div(size * itemsize, VECTOR_BYTES * THREADS * VECTORS)


def forward(
    dev: Device,
    out: Tensor | None,
    x: Tensor,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """out = 0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3))), computed in F32.

    Args (T is BF16 or F32):
        out      out    T (*S)     size a multiple of 16 bytes; may be x itself; or None with fp8
        x        in     T (*S)
        abs_max  inout  F32 (1,)   or None; raised to the largest |out|
        fp8      out    (rows, C)  or None; out in FP8, C = S[-1], rows and C multiples of 4, 16

    Cost:    one launch; with fp8 no more bytes than the codes.
    """
    op = "gelu.forward"
    rows, columns = _check(op, dev, "out", out, x, fp8)
    consts = abs_max_consts(op, abs_max) | NOT_AGAIN
    if fp8 is None:
        blocks, args = grid(x.size, x.dtype.itemsize), (out, x, x.size, abs_max)
        dev.launch(FORWARD, blocks, THREADS, args, consts=consts)
    else:
        consts |= fp8_consts(op, fp8, rows, columns)
        blocks = octet_tiles(op, rows, columns)
        args = (out, x, rows, columns, abs_max, *fp8_args(fp8))
        dev.launch(FORWARD_FP8, blocks, THREADS, args, consts=consts)


def backward(
    dev: Device,
    d_x: Tensor | None,
    d_out: Tensor,
    x: Tensor,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
    out: Tensor | None = None,
    out_fp8: Fp8Out | None = None,
) -> None:
    """d_x = d_out * gelu'(x), computed in F32.

    If forward's result was not kept, it can be written again, without another look at x.

    Args (T is BF16 or F32):
        d_x      out    T (*S)     size a multiple of 16 bytes; may be x or d_out; or None with fp8
        d_out    in     T (*S)
        x        in     T (*S)     what forward was given
        abs_max  inout  F32 (1,)   or None; raised to the largest |d_x|
        fp8      out    (rows, C)  or None; d_x in FP8, C = S[-1], rows and C multiples of 4, 16
        out      out    T (*S)     or None; the bits of forward's out; may be x or d_out
        out_fp8  out    (rows, C)  or None, if out is; those of its fp8, E4M3, only transposed
    """
    op = "gelu.backward"
    rows, columns = _check(op, dev, "d_x", d_x, x, fp8)
    expect(op, "d_out", d_out, x.dtype, x.shape)
    consts = again_consts(op, out, out_fp8, x.dtype, x.shape) | abs_max_consts(op, abs_max)
    if fp8 is None and out_fp8 is None:
        blocks, args = grid(x.size, x.dtype.itemsize), (d_x, d_out, x, x.size, abs_max, out)
        dev.launch(BACKWARD, blocks, THREADS, args, consts=consts)
    else:
        consts |= fp8_consts(op, fp8, rows, columns)
        blocks = octet_tiles(op, rows, columns)
        args = (d_x, d_out, x, rows, columns, abs_max, *fp8_args(fp8), *again_args(out, out_fp8))
        dev.launch(BACKWARD_FP8, blocks, THREADS, args, consts=consts)


def _check(
    op: str, dev: Device, name: str, result: Tensor | None, x: Tensor, fp8: Fp8Out | None
) -> tuple[int, int]:
    """x as a matrix: all but its last dimension, and that."""
    expect_float(op, "x", x)
    expect_multiple(op, dev, "x's size", x.size, VECTOR_BYTES // x.dtype.itemsize)
    if result is not None or fp8 is None:
        expect(op, name, result, x.dtype, x.shape)
    return x.size // x.shape[-1], x.shape[-1]
