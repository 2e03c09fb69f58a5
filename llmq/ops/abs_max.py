"""The largest magnitude of a tensor, from which its FP8 scale follows.

Most tensors that are quantized have theirs from the kernel that made them; this is a pass of its
own for the others.
"""

from llmq.base.dtypes import F32
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_BLOCK = 4 * 16 * THREADS  # bytes: four 16-byte loads in flight per thread
BLOCKS_PER_SM = 8  # fill it

ABS_MAX = Kernel("abs_max.cu", "abs_max", args="inout f32* abs_max, const T* x, i64 n")
COMBINE = Kernel(
    "abs_max.cu", "abs_max_combine", args="f32* out, const f32* gathered, i32 world_size, i64 n"
)

SCALES = Kernel(
    "abs_max.cu", "abs_max_scales", args="f32* scales, const f32* abs_maxes, f32 largest, i64 n"
)


def grid(nbytes: int, num_sms: int) -> int:
    """Blocks for a tensor of this many bytes; they loop over what is more than fills the GPU."""
    return min(ceil_div(nbytes, PER_BLOCK), BLOCKS_PER_SM * num_sms)


def abs_max(dev: Device, abs_max: Tensor, x: Tensor) -> None:
    """abs_max = max(abs_max, largest |x|); NaN is larger than everything.

    Args:
        abs_max  inout  F32 (1,)              not negative: zero it before the first of several
        x        in     F32 or BF16, any shape, at least one element
    """
    expect("abs_max", "abs_max", abs_max, F32, (1,))
    expect_float("abs_max", "x", x)
    if x.size == 0:
        raise ValueError(f"abs_max: x must have elements, got {x.shape}")
    dev.launch(ABS_MAX, grid(x.nbytes, dev.num_sms), THREADS, (abs_max, x, x.size))


def combine(dev: Device, out: Tensor, gathered: Tensor) -> None:
    """out[i] = the largest of gathered[rank * n + i] over the ranks; NaN is larger than everything.

    Args:
        out       out  F32 (n,)
        gathered  in   F32 (world_size * n,)   of each rank its n largest magnitudes, none negative
    """
    n = out.size
    expect("abs_max.combine", "out", out, F32, (n,))
    expect("abs_max.combine", "gathered", gathered, F32, (gathered.size,))
    if n == 0 or gathered.size == 0 or gathered.size % n:
        raise ValueError(
            f"abs_max.combine: gathered must have world_size * {n} elements, got {gathered.shape}"
        )
    dev.launch(COMBINE, ceil_div(n, THREADS), THREADS, (out, gathered, gathered.size // n, n))


def scales(dev: Device, scales: Tensor, abs_maxes: Tensor, largest: float) -> None:
    """The scales that `quantize` derives from largest magnitudes, of many tensors at once.

    Args:
        scales     out  F32 (n,)
        abs_maxes  in   F32 (n,)
        largest    the largest finite value of the FP8 format
    """
    n = scales.size
    expect("abs_max.scales", "scales", scales, F32, (n,))
    expect("abs_max.scales", "abs_maxes", abs_maxes, F32, (n,))
    dev.launch(SCALES, ceil_div(n, THREADS), THREADS, (scales, abs_maxes, float(largest), n))
