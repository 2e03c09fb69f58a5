"""Products of rows that are sorted by expert: each expert's rows with its own matrix.

The device alone knows which rows are whose, so that shapes, launches and plans are the same
whatever was chosen: blocks look for their tiles by themselves.
"""

from llmq.base.dtypes import BF16, E4M3_HALF, F32, FP8, I32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    VECTOR_BYTES,
    expect_accumulator,
    expect_matrix,
    expect_multiple,
    expect_operands,
)
from llmq.runtime.cost import Cost, product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

TILE, THREADS = 128, 128  # rows and columns of out that a block makes at a time
STAGES, STAGE_BYTES = 3, 2 * TILE * 64
BLOCKS = 2  # of a multiprocessor

PRODUCT = Kernel(
    "experts/grouped.cu",
    "grouped_product",
    args="T* out, const A* x, const B* w, const f32*? scale_x, const f32*? scale_w, "
    "const T*? bias, const T*? addend, const i32*? starts, i32 R, i32 N, i32 K, i32 E",
)
_GRADIENT_ARGS = (
    "const T* d_y, const T* x, const i32* scalars, const i32* starts, "
    "i32 R, i32 N, i32 K, i32 E, i32 accumulate, u32 salt"
)
GRADIENT = Kernel("experts/grouped.cu", "grouped_gradient", args=f"inout G* d_w, {_GRADIENT_ARGS}")


def grouped_matmul(
    dev: Device,
    out: Tensor,
    x: Tensor,
    w: Tensor,
    starts: Tensor | None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    *,
    trans_b: bool = False,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    half: bool = False,
) -> None:
    """out[r] = x[r] @ op(w[e]) [+ bias[e]] [+ addend[r]], r in [starts[e], starts[e + 1]).

    Sums are F32, of codes those of 64 products, times scale_x * scale_w; they are rounded once.
    half: those of 64 products of E4M3_HALF are in half precision, rounded after 32 and after 64.

    Args (X is BF16 or F32; N and K multiples of 16 bytes):
        out      out  X   (R, N)      BF16 of codes
        x        in   X   (R, K)      or E4M3, E5M2
        w        in   X   (E, K, N)   with trans_b (E, N, K); or E4M3, E5M2 with trans_b
        starts   in   I32 (E + 1,)    ascending from 0 to R, some may be equal; or None with E = 1
        scale_x  in   F32 (1,)        of codes, else None
        scale_w  in   F32 (1,)
        bias     in   X   (E, N)      or None
        addend   in   X   (R, N)      or None; may be out

    Cost:    2 R N K FLOPs; w of experts that have rows is read once for each 128 of them.
    """
    op, E, codes = "grouped_matmul", w.shape[0], x.dtype in FP8
    expect_matrix(op, "out", out, (BF16,) if codes else (F32, BF16))
    (R, N), K = out.shape, x.shape[-1]
    expect(op, "x", x, None if codes else out.dtype, (R, K))
    expect(op, "w", w, None if codes else x.dtype, (E, N, K) if trans_b else (E, K, N))
    if codes and not trans_b:
        raise ValueError(f"{op}: codes of w must be (E, N, K), with trans_b")
    flat = w.view(E * w.shape[1], w.shape[2])
    expect_operands(op, x, flat, scale_x, scale_w, dtypes=(*FP8, F32, BF16))
    _expect_rows(op, dev, (out, N), (x, K))
    if half and not x.dtype is w.dtype is E4M3_HALF:
        raise TypeError(f"{op}: half needs operands in {E4M3_HALF.label}, got {x.dtype.label}")
    if starts is not None or E != 1:
        expect(op, "starts", starts, I32, (E + 1,))
    if bias is not None:
        expect(op, "bias", bias, out.dtype, (E, N))
    if addend is not None:
        expect(op, "addend", addend, out.dtype, (R, N))
    tiles = (ceil_div(R, TILE) + E) * ceil_div(N, TILE)  # no routing has more
    dev.launch(
        PRODUCT,
        min(tiles, BLOCKS // (1 + codes) * dev.spec.num_sms),
        2 * THREADS if codes else THREADS,
        (out, x, w, scale_x, scale_w, bias, addend, starts, R, N, K, E),
        consts={"STAGES": STAGES, "TRANS_B": int(trans_b), "HALF": int(half)},
        smem=STAGES * STAGE_BYTES,
        cost=_cost((R, N, K), x, out, trans_b=trans_b, addend=addend is not None, half=half),
    )


def grouped_gradient(dev: Device, d_w: Accumulator, d_y: Tensor, x: Tensor, starts: Tensor) -> None:
    """d_w[e] (N, K) = or += d_y^T @ x over the rows of expert e.

    Without rows it becomes 0, or stays as it is. Sums are F32, and rounded to G before they are
    added; what they are added to is rounded stochastically, if it is BF16.

    Args (X is BF16 or F32, G is BF16 or F32; N and K multiples of 16 bytes):
        d_w     inout  Accumulator G (E, N, K)
        d_y     in     X   (R, N)
        x       in     X   (R, K)
        starts  in     I32 (E + 1,)    as of grouped_matmul

    Cost:    2 R N K FLOPs; d_w written once, and read once where it is added to.
    """
    op, E = "grouped_gradient", starts.size - 1
    expect_matrix(op, "d_y", d_y, (F32, BF16))
    (R, N), K = d_y.shape, x.shape[-1]
    expect(op, "x", x, d_y.dtype, (R, K))
    _expect_rows(op, dev, (d_y, N), (x, K))
    expect_accumulator(op, "d_w", d_w, (E, N, K))
    expect(op, "starts", starts, I32, (E + 1,))
    tensor, accumulate, scalars, salt = d_w
    dev.launch(
        GRADIENT,
        E * ceil_div(N, TILE) * ceil_div(K, TILE),
        THREADS,
        (tensor, d_y, x, scalars, starts, R, N, K, E, int(accumulate), salt),
        consts={"STAGES": STAGES},
        smem=STAGES * STAGE_BYTES,
        cost=_cost((N, K, R), x, tensor, trans_a=True, accumulate=accumulate),
    )


def _expect_rows(op: str, dev: Device, *sizes: tuple[Tensor, int]) -> None:
    """Raise ValueError unless so many elements are a multiple of 16 bytes, on a GPU."""
    for x, size in sizes:
        expect_multiple(op, dev, "N or K", size, VECTOR_BYTES // x.dtype.itemsize)


def _cost(sizes: tuple[int, int, int], a: Tensor, out: Tensor, **how: bool) -> Cost:
    return product_cost(sizes, a.dtype, out.dtype, epilogue="grouped", **how)
