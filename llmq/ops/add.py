"""Sum of two tensors: where a gradient comes back by two ways and no other kernel adds them."""

from __future__ import annotations

from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_THREAD = 8  # elements

ADD = Kernel("add.cu", "add", args="T* out, const T* a, const T* b, i64 n")


def add(dev: Device, out: Tensor, a: Tensor, b: Tensor) -> None:
    """out[i] = a[i] + b[i], rounded to nearest.

    Args:
        out   out  T  any shape   F32 or BF16; may be a or b
        a     in   T  the same
        b     in   T  the same

    Cost:    two reads and one write; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    expect_float("add", "a", a)
    expect("add", "b", b, a.dtype, a.shape)
    expect("add", "out", out, a.dtype, a.shape)
    dev.launch(ADD, ceil_div(a.size, THREADS * PER_THREAD), THREADS, (out, a, b, a.size))
