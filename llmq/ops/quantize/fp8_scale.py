"""Scales of FP8 tensors, from the largest |x| of the last optimizer steps or of one tensor."""

from collections.abc import Iterable

from llmq.base.dtypes import FP8_MAX, STATS, DType
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
STRIDE = 4  # elements from one scale to the next, because products need 16-byte alignment

UPDATE = Kernel(
    "quantize/fp8_scale.cu",
    "fp8_scale_update",
    "out f32[n,4] scales, out f32[n,4]? factors, inout f32[length,n] history, "
    "f32[n,4]? abs_maxes, f32[n] limits, i32 length, i32 n",
)
NOW = Kernel(
    "quantize/fp8_scale.cu", "fp8_scale_now", "out f32[1] scale, f32[1] abs_max, f32 limit"
)
COUNT = Kernel(
    "quantize/fp8_scale.cu",
    "fp8_scale_count",
    "inout f64[statistics] stats, i32[n,4] saturated, f32[n,4] abs_maxes, i32 n",
    where=f"statistics >= {len(STATS)}",
)


def slots(table: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the slot (1,) of each name in a table of n * STRIDE elements."""
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
    """Add a step to the history, and set scale = largest value of the history / limit.

    Values up to this largest value then become codes up to limit. scale is 1 if all values of the
    history are zero. A largest |x| that is not finite counts as 0.

    history: largest |x| of each step and tensor, oldest step first. limits: positive. abs_maxes:
    largest |x| in the added step; None: add no step. factors: out, 1 / scale. Only the first
    element of each row of four is used.
    """
    length, n = UPDATE.dims(history=history)
    args = (scales, factors, history, abs_maxes, limits, length, n)
    dev.launch(UPDATE, ceil_div(n, THREADS), THREADS, args)


def now(dev: Device, scale: Tensor, abs_max: Tensor, dtype: DType) -> None:
    """Set scale = max(abs_max, 1e-10) / MAX, as `quantize` does, for kernels that write codes. MAX
    is the largest finite value of the codes' dtype."""
    dev.launch(NOW, 1, 1, (scale, abs_max, FP8_MAX[dtype]))


def count(dev: Device, stats: Tensor, saturated: Tensor, abs_maxes: Tensor) -> None:
    """Add the counts of saturated elements to the statistics of the optimizer step.

    The norm becomes NaN if an abs_max is not finite: codes cannot show an infinity.

    saturated: unsigned 32-bit counts. Only the first element of each row of four is used. stats:
    begins with llmq.base.dtypes.STATS.
    """
    n = saturated.shape[0]
    dev.launch(COUNT, 1, THREADS, (stats, saturated, abs_maxes, n))


# -- Largest |x| of a tensor whose kernel has not recorded it

PER_BLOCK = 4 * 16 * THREADS  # bytes: four 16-byte loads in flight per thread
BLOCKS_PER_SM = 8  # number of thread blocks that fill a multiprocessor

ABS_MAX = Kernel(
    "quantize/fp8_scale.cu", "abs_max", "inout f32[1] abs_max, T[*n] x, i64 n", where="n >= 1"
)
COMBINE = Kernel(
    "quantize/fp8_scale.cu",
    "abs_max_combine",
    "out f32[n] out, f32[world_size*n] gathered, i32 world_size, i64 n",
    where="world_size >= 1, n >= 1",
)
SCALES = Kernel(
    "quantize/fp8_scale.cu",
    "abs_max_scales",
    "out f32[n] scales, f32[n] abs_maxes, f32 largest, i64 n",
)


def grid(nbytes: int, num_sms: int) -> int:
    """Return the number of thread blocks for a tensor of `nbytes` bytes, at most as many as fill
    the GPU; blocks loop over the tensor."""
    return min(ceil_div(nbytes, PER_BLOCK), BLOCKS_PER_SM * num_sms)


def abs_max(dev: Device, abs_max: Tensor, x: Tensor) -> None:
    """Set abs_max = max(abs_max, largest |x|); NaN counts as largest. abs_max: not negative; must
    be zero before the first of several tensors."""
    dev.launch(ABS_MAX, grid(x.nbytes, dev.num_sms), THREADS, (abs_max, x, x.size))


def combine(dev: Device, out: Tensor, gathered: Tensor) -> None:
    """Set out[i] to the largest gathered[rank * n + i] over all ranks; NaN counts as largest.
    gathered: not negative."""
    n = out.size
    world_size = gathered.size // n if n else 0
    dev.launch(COMBINE, ceil_div(n, THREADS), THREADS, (out, gathered, world_size, n))


def scales(dev: Device, scales: Tensor, abs_maxes: Tensor, largest: float) -> None:
    """Set the scales of many tensors at once, as `quantize` does. largest: the largest finite value
    of the FP8 dtype."""
    n = scales.size
    dev.launch(SCALES, ceil_div(n, THREADS), THREADS, (scales, abs_maxes, float(largest), n))
