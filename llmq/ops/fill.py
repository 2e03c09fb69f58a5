"""Fill a tensor with one value."""

from __future__ import annotations

from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256

FILL = Kernel("fill.cu", "fill", args="T* x, f32 value, i64 n")


def constant(dev: Device, x: Tensor, value: float) -> None:
    """x[i] = value, rounded to x's dtype.

    Args:
        x   out  F32 or BF16, any shape

    Cost:    x written once; one launch.
    Raises:  TypeError for a wrong dtype.
    """
    expect_float("fill", "x", x)
    dev.launch(FILL, ceil_div(x.nbytes, 16 * THREADS), THREADS, (x, float(value), x.size))
