"""Rounding of weights to -1, 0 and 1 times one scale for each module: the module's mean |w|."""

from collections.abc import Sequence

from llmq.base.dtypes import F32
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS, SCALE_THREADS = 256, 1024
WARPS, PER_THREAD = 8, 4  # rows of a block of SUMS; elements of a thread in other kernels

_MATRIX = "cols % 16"
SUMS = Kernel(
    "quantize/ternary.cu",
    "ternary_sums",
    "out f32[rows] sums, T[rows,cols] w, i64 rows, i32 cols",
    where=_MATRIX,
)
SCALES = Kernel(
    "quantize/ternary.cu",
    "ternary_scales",
    "out f32[rows] scale, f32[rows] sums, i64 rows, i32 cols",
)
CODES = Kernel(
    "quantize/ternary.cu",
    "ternary_codes",
    "out i8[rows,cols] q, T[rows,cols] w, f32[rows] scale, i64 rows, i32 cols",
    where=_MATRIX,
)
ROUND = Kernel(
    "quantize/ternary.cu",
    "ternary_round",
    "out T[rows,cols] out, T[rows,cols] w, f32[rows] scale, i64 rows, i32 cols",
    where=_MATRIX,
)


def scales(dev: Device, scale: Tensor, w: Tensor, modules: Sequence[int]) -> None:
    """Set scale (rows,), F32, to the mean |w| of each row's module, but at least 1e-5. modules:
    number of rows of each module in w (rows, cols).

    Cost:    w read once; one launch, and one launch of a single block for each module.
    """
    n, cols = SUMS.dims(w=w)
    with dev.scratch("ternary_sums", (n,), F32) as sums:
        dev.launch(SUMS, ceil_div(n, WARPS), THREADS, (sums, w, n, cols))
        start = 0
        for rows in modules:
            own = scale.rows(start, start + rows), sums.rows(start, start + rows)
            dev.launch(SCALES, 1, SCALE_THREADS, (*own, rows, cols))
            start += rows


def codes(dev: Device, q: Tensor, w: Tensor, scale: Tensor) -> None:
    """Set q, I8, to -1, 0 or 1, whichever is nearest to w / scale, with one scale for each row."""
    n, cols = CODES.dims(w=w)
    dev.launch(CODES, ceil_div(w.size, PER_THREAD * THREADS), THREADS, (q, w, scale, n, cols))


def round_(dev: Device, out: Tensor, w: Tensor, scale: Tensor) -> None:
    """Set out to the codes of w times their scales, in w's dtype."""
    n, cols = ROUND.dims(w=w)
    dev.launch(ROUND, ceil_div(w.size, PER_THREAD * THREADS), THREADS, (out, w, scale, n, cols))
