"""GELU with the tanh approximation (Hugging Face's gelu_new), and the square of ReLU."""

from llmq.base.operand import Fp8Out
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    NOT_AGAIN,
    VECTOR_BYTES,
    abs_max_consts,
    again_args,
    again_consts,
    declared_again,
    declared_fp8,
    fp8_args,
    fp8_consts,
    octet_tiles,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
VECTORS = 2  # 16-byte vectors per thread; VECTORS in cu/pointwise/gelu.cu

FORWARD = Kernel(
    "pointwise/gelu.cu",
    "gelu_forward",
    "out T[*n] out, T[*n] x, i64 n, inout f32[1]? abs_max",
    gpu="n % vector_T",
    programmatic=True,
)
BACKWARD = Kernel(
    "pointwise/gelu.cu",
    "gelu_backward",
    "out T[*n] d_x, T[*n] d_out, T[*n] x, i64 n, inout f32[1]? abs_max, out T[*n]? out",
    gpu="n % vector_T",
)
FORWARD_FP8 = Kernel(
    "pointwise/gelu.cu",
    "gelu_forward_fp8",
    "out T[*rows,columns]? out, T[*rows,columns] x, i64 rows, i32 columns, inout f32[1]? abs_max, "
    + declared_fp8("rows", "columns"),
    where="rows % 4, columns % 16",
)
BACKWARD_FP8 = Kernel(
    "pointwise/gelu.cu",
    "gelu_backward_fp8",
    "out T[*rows,columns]? d_x, T[*rows,columns] d_out, T[*rows,columns] x, i64 rows, "
    f"i32 columns, inout f32[1]? abs_max, {declared_fp8('rows', 'columns')}, "
    + declared_again("rows", "columns"),
    where="rows % 4, columns % 16",
)


def grid(size: int, itemsize: int) -> int:
    """Number of thread blocks for `size` elements: a thread has VECTORS vectors of 16 bytes."""
    return ceil_div(size * itemsize, VECTOR_BYTES * THREADS * VECTORS)


def forward(
    dev: Device,
    out: Tensor | None,
    x: Tensor,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
    relu2: bool = False,
) -> None:
    """out = 0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3))), computed in F32.

    With relu2 out = max(x, 0)^2.

    out: may be x, or None with fp8. fp8: gets out in FP8; rows must be a multiple of 4, columns of
    16. abs_max: raised to the largest |out|.

    Cost:    one launch; fp8 adds only the bytes of the codes.
    """
    op = "gelu.forward"
    consts = abs_max_consts(abs_max) | NOT_AGAIN | {"RELU2": int(relu2)}
    if fp8 is None:
        blocks, args = grid(x.size, x.dtype.itemsize), (out, x, x.size, abs_max)
        dev.launch(FORWARD, blocks, THREADS, args, consts=consts)
    else:
        rows, columns = FORWARD_FP8.dims(x=x)
        consts |= fp8_consts(op, fp8, rows, columns)
        args = (out, x, rows, columns, abs_max, *fp8_args(fp8))
        dev.launch(FORWARD_FP8, octet_tiles(rows, columns), THREADS, args, consts=consts)


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
    relu2: bool = False,
) -> None:
    """d_x = d_out * gelu'(x), computed in F32; with relu2 d_out * 2 max(x, 0).

    d_x: may be x or d_out, or None with fp8. fp8, abs_max: get codes and the largest |d_x|, as in
    forward. out, out_fp8: get forward's output again, bit for bit, in the same launch; out may be x
    or d_out, and out_fp8 has transposed E4M3 codes only.
    """
    op = "gelu.backward"
    if d_x is None and fp8 is None:
        raise TypeError(f"{op}: d_x or fp8 must be given, both are None")
    consts = again_consts(op, out, out_fp8) | abs_max_consts(abs_max) | {"RELU2": int(relu2)}
    if fp8 is None and out_fp8 is None:
        blocks, args = grid(x.size, x.dtype.itemsize), (d_x, d_out, x, x.size, abs_max, out)
        dev.launch(BACKWARD, blocks, THREADS, args, consts=consts)
    else:
        rows, columns = BACKWARD_FP8.dims(x=x)
        consts |= fp8_consts(op, fp8, rows, columns)
        args = (d_x, d_out, x, rows, columns, abs_max, *fp8_args(fp8), *again_args(out, out_fp8))
        dev.launch(BACKWARD_FP8, octet_tiles(rows, columns), THREADS, args, consts=consts)
