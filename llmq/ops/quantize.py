"""BF16 or F32 to FP8, with one scale for the whole tensor."""

from __future__ import annotations

from llmq.dtypes import E4M3, E5M2, F32
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect
from llmq.runtime.tensor import Tensor

THREADS = 256
PER_BLOCK = 4 * 8 * THREADS  # elements: four times eight per thread; OCTETS in cu/quantize.cu
TILE_ROWS, TILE_COLUMNS = 128, 64  # as in cu/quantize.cu
MULTIPLE = 16  # of rows and columns: one 16-byte access

QUANTIZE = Kernel(
    "quantize.cu", "quantize", args="Q* q, f32* scale, const T* x, const f32* abs_max, i64 n"
)
TRANSPOSE = Kernel(
    "quantize.cu",
    "quantize_transpose",
    args="Q*? q, Q* q_t, f32* scale, const T* x, const f32* abs_max, i64 rows, i32 cols",
)


def grid(size: int) -> int:
    """Blocks to quantize this many elements in the order they lie in."""
    return ceil_div(size, PER_BLOCK)


def tiles(rows: int, cols: int) -> tuple[int, int]:
    """Blocks to quantize and transpose: across, down."""
    return ceil_div(cols, TILE_COLUMNS), ceil_div(rows, TILE_ROWS)


def quantize(
    dev: Device,
    q: Tensor | None,
    q_t: Tensor | None,
    scale: Tensor,
    x: Tensor,
    abs_max: Tensor,
) -> None:
    """q = x / scale, q_t its transpose; scale = max(abs_max, 1e-10) / MAX.

    MAX is the largest finite value of the FP8 format. Values are rounded to nearest even and
    clamped to +-MAX. Where abs_max is infinite or NaN, scale is 1 and x is encoded as it is: NaN
    stays NaN, infinity becomes MAX.

    Args (Q is E4M3 or E5M2):
        q        out  Q (rows, cols)          or None; at least one of q and q_t
        q_t      out  Q (cols, rows)          or None
        scale    out  F32 (1,)
        x        in   BF16 or F32 (rows, cols), both multiples of 16
        abs_max  in   F32 (1,)                largest |x|

    Cost:    x read once, q and q_t written; one launch.
    Raises:  TypeError for a wrong dtype or no output, ValueError for a wrong shape.
    """
    _check(q, q_t, scale, x, abs_max)
    rows, cols = x.shape
    if q_t is None:
        dev.launch(QUANTIZE, grid(x.size), THREADS, (q, scale, x, abs_max, x.size))
    else:
        args = (q, q_t, scale, x, abs_max, rows, cols)
        dev.launch(TRANSPOSE, tiles(rows, cols), THREADS, args)


def _check(q: Tensor | None, q_t: Tensor | None, scale: Tensor, x: Tensor, abs_max: Tensor) -> None:
    expect_float("quantize", "x", x)
    if len(x.shape) != 2 or any(n % MULTIPLE or n <= 0 for n in x.shape):
        raise ValueError(f"quantize: x must have rows and cols multiples of 16, got {x.shape}")
    if q is None and q_t is None:
        raise TypeError("quantize: q or q_t must be a tensor, both are None")
    dtype = None  # of both
    for name, tensor, shape in (("q", q, x.shape), ("q_t", q_t, x.shape[::-1])):
        if tensor is not None:
            expect("quantize", name, tensor, dtype, shape)
            dtype = tensor.dtype
            if dtype not in (E4M3, E5M2):
                raise TypeError(f"quantize: {name} must be E4M3 or E5M2, got {dtype.label}")
    expect("quantize", "scale", scale, F32, (1,))
    expect("quantize", "abs_max", abs_max, F32, (1,))
