"""Add a tensor to a gradient."""

from __future__ import annotations

from llmq.dtypes import BF16, F32, I32, STEP_SCALARS_WORDS
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect
from llmq.runtime.tensor import Accumulator, Tensor

THREADS = 256
PER_THREAD = 8  # elements

REDUCE_ADD = Kernel(
    "reduce.cu",
    "reduce_add",
    args="inout G* d_sum, const T* x, const i32* scalars, i32 accumulate, u32 salt, i64 n",
)


def add(dev: Device, acc: Accumulator, x: Tensor) -> None:
    """acc.tensor += x, or = x where acc.accumulate is false.

    Args:
        acc.tensor   inout  F32 or BF16, x's shape; BF16 sums are rounded stochastically
        x            in     F32 or BF16, any shape

    Cost:    both read, one written, once; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    expect("reduce", "acc.tensor", acc.tensor, None, x.shape)
    expect("reduce", "acc.scalars", acc.scalars, I32, (STEP_SCALARS_WORDS,))
    for name, tensor in (("acc.tensor", acc.tensor), ("x", x)):
        if tensor.dtype not in (F32, BF16):
            raise TypeError(f"reduce: {name} must be F32 or BF16, got {tensor.dtype.label}")
    args = (acc.tensor, x, acc.scalars, int(acc.accumulate), acc.salt, x.size)
    dev.launch(REDUCE_ADD, ceil_div(x.size, THREADS * PER_THREAD), THREADS, args)
