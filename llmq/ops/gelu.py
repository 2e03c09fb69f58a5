"""GELU with the tanh approximation: the activation of GPT-2 (Hugging Face's gelu_new)."""

from __future__ import annotations

from llmq.ops.common import VECTOR_BYTES, abs_max_consts, expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect
from llmq.runtime.tensor import Tensor

THREADS = 256
VECTORS = 2  # 16-byte vectors per thread; VECTORS in cu/gelu.cu

FORWARD = Kernel("gelu.cu", "gelu_forward", args="T* out, const T* x, i64 n, inout f32*? abs_max")
BACKWARD = Kernel(
    "gelu.cu",
    "gelu_backward",
    args="T* d_x, const T* d_out, const T* x, i64 n, inout f32*? abs_max",
)


def grid(size: int, itemsize: int) -> int:
    """Blocks for `size` elements: every thread handles VECTORS vectors of 16 bytes."""
    return ceil_div(size * itemsize, VECTOR_BYTES * THREADS * VECTORS)


def forward(dev: Device, out: Tensor, x: Tensor, *, abs_max: Tensor | None = None) -> None:
    """out = 0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3))), computed in F32.

    Args (T is BF16 or F32):
        out      out    T (*S)     size a multiple of 16 bytes; may be x itself
        x        in     T (*S)
        abs_max  inout  F32 (1,)   or None; raised to the largest |out|

    Raises: TypeError for a wrong dtype, ValueError for a wrong shape or size.
    """
    _check("gelu.forward", x)
    expect("gelu.forward", "out", out, x.dtype, x.shape)
    dev.launch(
        FORWARD,
        grid(x.size, x.dtype.itemsize),
        THREADS,
        (out, x, x.size, abs_max),
        consts=abs_max_consts("gelu.forward", abs_max),
    )


def backward(
    dev: Device, d_x: Tensor, d_out: Tensor, x: Tensor, *, abs_max: Tensor | None = None
) -> None:
    """d_x = d_out * gelu'(x), computed in F32.

    Args (T is BF16 or F32):
        d_x      out    T (*S)     size a multiple of 16 bytes; may be x or d_out itself
        d_out    in     T (*S)
        x        in     T (*S)     what forward was given
        abs_max  inout  F32 (1,)   or None; raised to the largest |d_x|

    Raises: TypeError for a wrong dtype, ValueError for a wrong shape or size.
    """
    _check("gelu.backward", x)
    expect("gelu.backward", "d_x", d_x, x.dtype, x.shape)
    expect("gelu.backward", "d_out", d_out, x.dtype, x.shape)
    dev.launch(
        BACKWARD,
        grid(x.size, x.dtype.itemsize),
        THREADS,
        (d_x, d_out, x, x.size, abs_max),
        consts=abs_max_consts("gelu.backward", abs_max),
    )


def _check(op: str, x: Tensor) -> None:
    expect_float(op, "x", x)
    if x.nbytes % VECTOR_BYTES:
        raise ValueError(f"{op}: x must have a multiple of 16 bytes, got {x.size} elements")
