"""A moving average of weights, and its exchange with them while it is used in their place."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_part
from llmq.runtime.cost import Cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 128
PER_THREAD = 8  # elements

UPDATE = Kernel(
    "average.cu",
    "average_update",
    args="inout f32* average, const P* param, const i32* scalars, f32 decay, i64 n",
)
EXCHANGE = Kernel(
    "average.cu", "average_exchange", args="inout f32* average, inout P* param, i32 back, i64 n"
)


def update(dev: Device, average: Tensor, param: Tensor, scalars: Tensor, decay: float) -> None:
    """average += (1 - d) * (param - average), with d = min(decay, (1 + step) / (10 + step)).

    A smaller decay at the start lets the average forget the first weights. Nothing changes when
    scalars.skip_update is set.

    Args (contiguous; n a positive multiple of 128):
        average  inout  F32 (n,)
        param    in     F32 or BF16 (n,)
        scalars  in     I32 (16,)          StepScalars: step, skip_update
    """
    n = expect_part("average", {"average": average, "param": param}, scalars)
    expect("average", "average", average, F32, (n,))
    args = (average, param, scalars, decay, n)
    dev.launch(UPDATE, ceil_div(n, THREADS * PER_THREAD), THREADS, args, cost=Cost(flops=3 * n))


def exchange(dev: Device, average: Tensor, param: Tensor, *, back: bool) -> None:
    """Put the average, rounded to nearest, in the place of param; with back give both back.

    Both ways no bit is lost, and no memory is needed: until they are given back, average is no
    number that anybody else can use.

    Args (contiguous; n a positive multiple of 128):
        average  inout  F32 (n,)
        param    inout  F32 or BF16 (n,)
    """
    n = expect_part("average", {"average": average, "param": param})
    expect("average", "average", average, F32, (n,))
    args = (average, param, int(back), n)
    dev.launch(EXCHANGE, ceil_div(n, THREADS * PER_THREAD), THREADS, args)
