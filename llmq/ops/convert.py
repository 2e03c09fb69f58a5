"""Convert between F32 and BF16."""

from __future__ import annotations

from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_THREAD = 8  # elements

CONVERT = Kernel("convert.cu", "convert", args="D* out, const S* x, i64 n")


def convert(dev: Device, out: Tensor, x: Tensor) -> None:
    """out[i] = x[i] in out's dtype, rounded to nearest.

    Args:
        out   out  F32 or BF16, any shape
        x     in   F32 or BF16, the same shape

    Cost:    x read and out written once; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    expect("convert", "out", out, None, x.shape)
    expect_float("convert", "out", out)
    expect_float("convert", "x", x)
    dev.launch(CONVERT, ceil_div(x.size, THREADS * PER_THREAD), THREADS, (out, x, x.size))
