"""Operations on each element of a tensor alone: sums of two, other formats, one value."""

from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES, expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_THREAD = 8  # elements

ADD = Kernel("elementwise.cu", "add", args="T* out, const T* a, const T* b, i64 n")
CONVERT = Kernel("elementwise.cu", "convert", args="D* out, const S* x, i64 n")
FILL = Kernel("elementwise.cu", "fill", args="T* x, f32 value, i64 n")


def add(dev: Device, out: Tensor, a: Tensor, b: Tensor) -> None:
    """out[i] = a[i] + b[i], rounded to nearest.

    Args:
        out   out  T  any shape   F32 or BF16; may be a or b
        a     in   T  the same
        b     in   T  the same
    """
    expect_float("add", "a", a)
    expect("add", "b", b, a.dtype, a.shape)
    expect("add", "out", out, a.dtype, a.shape)
    dev.launch(ADD, ceil_div(a.size, THREADS * PER_THREAD), THREADS, (out, a, b, a.size))


def convert(dev: Device, out: Tensor, x: Tensor) -> None:
    """out[i] = x[i] in out's dtype, rounded to nearest.

    Args:
        out   out  F32 or BF16, any shape
        x     in   F32 or BF16, the same shape
    """
    expect("convert", "out", out, None, x.shape)
    expect_float("convert", "out", out)
    expect_float("convert", "x", x)
    dev.launch(CONVERT, ceil_div(x.size, THREADS * PER_THREAD), THREADS, (out, x, x.size))


def fill(dev: Device, x: Tensor, value: float) -> None:
    """x[i] = value, rounded to x's dtype.

    Args:
        x   out  F32 or BF16, any shape
    """
    expect_float("fill", "x", x)
    dev.launch(FILL, ceil_div(x.nbytes, VECTOR_BYTES * THREADS), THREADS, (x, float(value), x.size))
