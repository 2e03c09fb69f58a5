"""The time between two points of a stream, added up on the device: works in graphs."""

from llmq.base.dtypes import F64, I64
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

START = Kernel("pointwise/clock.cu", "clock_start", args="i64* at")
STOP = Kernel("pointwise/clock.cu", "clock_stop", args="inout f64* total, const i64* at")


def start(dev: Device, at: Tensor) -> None:
    """at = now: when the device gets here.

    Args:
        at  out  I64 (1,)  nanoseconds since some time in the past
    """
    expect("clock", "at", at, I64, (1,))
    dev.launch(START, 1, 1, (at,))


def stop(dev: Device, total: Tensor, at: Tensor) -> None:
    """total += milliseconds since `start` has written at. Between the two lies at least a launch.

    Args:
        total  inout  F64 (1,)  milliseconds
        at     in     I64 (1,)
    """
    expect("clock", "total", total, F64, (1,))
    expect("clock", "at", at, I64, (1,))
    dev.launch(STOP, 1, 1, (total, at))
