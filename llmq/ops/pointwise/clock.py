"""Time between two points of a stream, summed on the device; works in CUDA graphs, too."""

from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel

START = Kernel("pointwise/clock.cu", "clock_start", "out i64[1] at")
STOP = Kernel("pointwise/clock.cu", "clock_stop", "inout f64[1] total, i64[1] at")


def start(dev: Device, at: Tensor) -> None:
    """at = the device's clock in nanoseconds."""
    dev.launch(START, 1, 1, (at,))


def stop(dev: Device, total: Tensor, at: Tensor) -> None:
    """total += milliseconds since `start` wrote `at`. At least one launch must lie between `start`
    and `stop`."""
    dev.launch(STOP, 1, 1, (total, at))
