"""Scales of FP8 tensors: from largest values of the last optimizer steps, or one of them."""

from collections.abc import Iterable

from llmq.base.dtypes import F32, FP8_MAX, I32, DType
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float, expect_stats
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
STRIDE = 4  # elements from one tensor's scale to the next one's: products need 16-byte alignment

UPDATE = Kernel(
    "quantize/fp8_scale.cu",
    "fp8_scale_update",
    args="f32* scales, f32*? factors, inout f32* history, const f32*? abs_maxes, "
    "const f32* limits, i32 length, i32 n",
)
NOW = Kernel(
    "quantize/fp8_scale.cu", "fp8_scale_now", args="f32* scale, const f32* abs_max, f32 limit"
)
COUNT = Kernel(
    "quantize/fp8_scale.cu",
    "fp8_scale_count",
    args="inout f64* stats, const i32* saturated, const f32* abs_maxes, i32 n",
)


def slots(table: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """The slots of a table of n * STRIDE elements: each tensor's own one (1,), by the tensor's
    name."""
    flat = table.view(table.size)
    return {name: flat.rows(i * STRIDE, i * STRIDE + 1) for i, name in enumerate(names)}


def update(
    dev: Device,
    scales: Tensor,
    history: Tensor,
    limits: Tensor,
    abs_maxes: Tensor | None,
    *,
    factors: Tensor | None = None,
) -> None:
    """Add a step to the history, and scale = largest of the history / limit.

    Values up to that largest one then become codes up to limit. scale is 1 where the history has
    nothing but zeros. A largest value that is not finite counts as 0.

    Args (of each row of four only the first element is used):
        scales     out    F32 (n, 4)
        history    inout  F32 (length, n)  largest values, the oldest step first
        limits     in     F32 (n,)         positive
        abs_maxes  in     F32 (n, 4)       of the step that is added; None: none is
        factors    out    F32 (n, 4)       or None; 1 / scale
    """
    if len(history.shape) != 2:
        raise ValueError(f"fp8_scale: history must have 2 dimensions, got {history.shape}")
    length, n = history.shape
    expect("fp8_scale", "scales", scales, F32, (n, STRIDE))
    expect("fp8_scale", "history", history, F32, (length, n))
    expect("fp8_scale", "limits", limits, F32, (n,))
    if abs_maxes is not None:
        expect("fp8_scale", "abs_maxes", abs_maxes, F32, (n, STRIDE))
    if factors is not None:
        expect("fp8_scale", "factors", factors, F32, (n, STRIDE))
    args = (scales, factors, history, abs_maxes, limits, length, n)
    dev.launch(UPDATE, ceil_div(n, THREADS), THREADS, args)


def now(dev: Device, scale: Tensor, abs_max: Tensor, dtype: DType) -> None:
    """scale = that of `quantize`, for kernels that write codes: max(abs_max, 1e-10) / MAX.

    Args:
        scale    out  F32 (1,)
        abs_max  in   F32 (1,)
        dtype         of the codes, FP8, whose largest finite value is MAX
    """
    expect("fp8_scale", "scale", scale, F32, (1,))
    expect("fp8_scale", "abs_max", abs_max, F32, (1,))
    dev.launch(NOW, 1, 1, (scale, abs_max, FP8_MAX[dtype]))


def count(dev: Device, stats: Tensor, saturated: Tensor, abs_maxes: Tensor) -> None:
    """Adds the counts of saturated elements to the statistics of the optimizer step.

    The norm becomes NaN where a largest value is not finite: codes do not show an infinity.

    Args (of each row of four only the first element is used):
        stats      inout  F64 (s,)    begins with llmq.base.dtypes.STATS
        saturated  in     I32 (n, 4)  counts of 32 bits, no sign
        abs_maxes  in     F32 (n, 4)  of the step
    """
    expect_stats("fp8_scale", stats)
    n = saturated.shape[0]
    expect("fp8_scale", "saturated", saturated, I32, (n, STRIDE))
    expect("fp8_scale", "abs_maxes", abs_maxes, F32, (n, STRIDE))
    dev.launch(COUNT, 1, THREADS, (stats, saturated, abs_maxes, n))


# -- The largest magnitude of a tensor, where the kernel that made it has not found it

PER_BLOCK = 4 * 16 * THREADS  # bytes: four 16-byte loads in flight per thread
BLOCKS_PER_SM = 8  # fill it

ABS_MAX = Kernel("quantize/fp8_scale.cu", "abs_max", args="inout f32* abs_max, const T* x, i64 n")
COMBINE = Kernel(
    "quantize/fp8_scale.cu",
    "abs_max_combine",
    args="f32* out, const f32* gathered, i32 world_size, i64 n",
)

SCALES = Kernel(
    "quantize/fp8_scale.cu",
    "abs_max_scales",
    args="f32* scales, const f32* abs_maxes, f32 largest, i64 n",
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
