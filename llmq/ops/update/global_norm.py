"""The norm of all gradients over all ranks, and the scale that AdamW applies to them."""

from collections.abc import Iterable
from itertools import accumulate, pairwise

from llmq.base.dtypes import F64, STATS
from llmq.base.tensor import Tensor
from llmq.runtime.cost import Cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_BLOCK = 4 * 16 * THREADS  # bytes: four 16-byte loads in flight per thread
SUM_THREADS = 1024
MOST_STATS = 63  # most statistics: a bit of an i64 number says whether a statistic is a maximum

_STATS = f"statistics >= {len(STATS)}"
PARTIALS = Kernel(
    "update/global_norm.cu",
    "global_norm_partials",
    "out f64[num_partials] partials, G[*n] x, i64 n",
    where="n >= 1",
)
SUM = Kernel(
    "update/global_norm.cu",
    "global_norm_sum",
    "inout f64[statistics] stats, f64[num_partials] partials, i32 num_partials",
    where=_STATS,
)
COMBINE = Kernel(
    "update/global_norm.cu",
    "global_norm_combine",
    "out f64[statistics] stats, f64[world_size,statistics] gathered, i32 world_size, i64 maxima",
    where=f"{_STATS}, statistics <= {MOST_STATS}",
)
FINISH = Kernel(
    "update/global_norm.cu",
    "global_norm_finish",
    "inout f64[statistics] stats, inout i32[16] scalars",
    where=_STATS,
)


def num_partials(dev: Device, x: Tensor) -> int:
    """Return the number of partial sums of a tensor, one for each thread block; 8 blocks fill an
    SM. The number is even, so that the next tensor's partial sums start at a multiple of 16
    bytes."""
    return 2 * min(ceil_div(x.nbytes, 2 * PER_BLOCK), 4 * dev.num_sms)


def split(dev: Device, sums: Tensor, xs: list[Tensor]) -> list[Tensor]:
    """Return each tensor's part (num_partials,) of sums. sums: F64, with the parts of all xs, one
    after another."""
    ends = list(accumulate(num_partials(dev, x) for x in xs))
    return [sums.rows(start, end) for start, end in pairwise([0, *ends])]


def partials(dev: Device, sums: Tensor, x: Tensor) -> None:
    """Write partial sums of squares of x, with the same bits every time. sums: F64
    (num_partials(dev, x),)."""
    expect("global_norm", "sums", sums, F64, (num_partials(dev, x),))
    dev.launch(PARTIALS, sums.size, THREADS, (sums, x, x.size), cost=Cost(flops=2 * x.size))


def total(dev: Device, stats: Tensor, sums: Tensor) -> None:
    """Add sum(sums) to stats[norm_squared], in a fixed order. stats: begins with
    base.dtypes.STATS."""
    dev.launch(SUM, 1, SUM_THREADS, (stats, sums, sums.size))


def combine(dev: Device, stats: Tensor, gathered: Tensor, maxima: Iterable[int] = ()) -> None:
    """Write the sums of all ranks' statistics, added in the order of the ranks.

    stats: begins with llmq.base.dtypes.STATS. gathered: the statistics of each rank. maxima:
    indices of the statistics for which the largest value replaces the sum.
    """
    world_size = gathered.shape[0]
    bits = sum(1 << index for index in maxima)
    dev.launch(COMBINE, 1, stats.size, (stats, gathered, world_size, bits))


def finish(dev: Device, stats: Tensor, scalars: Tensor) -> None:
    """Compute norm, gradient scale and skip flag for the update rule from the sum of squares.

        count = stats[count]              norm = sqrt(stats[norm_squared]) / count
        stats[norm] = norm
        scalars.grad_scale = (grad_clip / norm if 0 < grad_clip < norm else 1) / count
        scalars.skip_update = norm is not finite, or count == 0, or a limit above 0 is not kept:
                              norm <= scalars.norm_limit, loss / count <= scalars.loss_limit

    The norm is 0 if count is 0. A skipped update has grad_scale 0.

    stats: begins with llmq.base.dtypes.STATS; loss, count and norm_squared are final.
    """
    dev.launch(FINISH, 1, 1, (stats, scalars))
