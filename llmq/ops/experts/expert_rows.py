"""Rows of a micro-batch sorted by the experts that they go to, and what comes back to each row.

A row goes to top_k experts, so S rows make R = S * top_k choices: choice s * top_k + k is the k-th
of row s. Sorted by expert, and by number where the expert is the same, they are the rows of the
experts' matrices; nothing is left out, whatever was chosen.
"""

from llmq.base.dtypes import F32, FP8, I32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import VECTOR_BYTES, WARP, expect_accumulator, expect_float, expect_multiple
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS, SCAN_THREADS = 256, 1024
MAX_EXPERTS = 512
CHUNK = 2048  # choices that a block sorts
WIDTH, SLICE = 8, 32 * 8  # columns of a lane and of a warp
PIECE_BYTES = 32 * 4 * VECTOR_BYTES  # of a row that a warp of GATHER has
MAX_CHOICES = 32

COUNT = Kernel(
    "experts/expert_rows.cu",
    "rows_count",
    args="i32* counts, const i32* chosen, i32 n, i32 E, i32 chunk",
)
SCAN = Kernel(
    "experts/expert_rows.cu", "rows_scan", args="i32* starts, inout i32* counts, i32 blocks, i32 E"
)
PLACE = Kernel(
    "experts/expert_rows.cu",
    "rows_place",
    args="i32* order, i32* place, const i32* chosen, const i32* counts, i32 n, i32 E, i32 chunk",
)
GATHER = Kernel(
    "experts/expert_rows.cu",
    "rows_gather",
    args="Q* out, const Q* x, const i32* place, i32 rows, i32 C, i32 top_k",
)
COMBINE = Kernel(
    "experts/expert_rows.cu",
    "rows_combine",
    args="T* out, const T* y, const i32* place, const f32*? weights, const T*? addend, "
    "i32 rows, i32 C, i32 top_k",
)
COMBINE_BACKWARD = Kernel(
    "experts/expert_rows.cu",
    "rows_combine_backward",
    args="inout T* d_y, f32* d_weights, T*? weighted, const T* y, const i32* place, "
    "const f32* weights, i32 rows, i32 C, i32 top_k",
)
SUM = Kernel(
    "experts/expert_rows.cu",
    "rows_sum",
    args="inout G* d_sum, const T* x, const f32*? weights, const i32*? order, const i32* scalars, "
    "const i32* starts, i32 C, i32 E, i32 accumulate, u32 salt",
)


def sort_rows(dev: Device, order: Tensor, place: Tensor, starts: Tensor, chosen: Tensor) -> None:
    """The choices in the order of their experts.

    Args:
        order   out  I32 (R,)        which choice is at each place
        place   out  I32 (S, top_k)  where each choice is
        starts  out  I32 (E + 1,)    the places of expert e are [starts[e], starts[e + 1])
        chosen  in   I32 (S, top_k)  experts, in [0, E); E at most 512. They are not checked

    Cost:    about four times chosen's bytes, in three launches; E bytes of scratch for 512 choices.
    """
    op = "sort_rows"
    S, top_k = _matrix(op, "chosen", chosen)
    R, E = S * top_k, starts.size - 1
    expect(op, "chosen", chosen, I32, (S, top_k))
    expect(op, "order", order, I32, (R,))
    expect(op, "place", place, I32, (S, top_k))
    expect(op, "starts", starts, I32, (E + 1,))
    if not 1 <= E <= MAX_EXPERTS:
        raise ValueError(f"{op}: experts must be 1 to {MAX_EXPERTS}, got {E}")
    blocks = ceil_div(R, CHUNK)
    with dev.scratch("rows by block and expert", (blocks, E), I32) as counts:
        dev.launch(COUNT, blocks, THREADS, (counts, chosen, R, E, CHUNK))
        dev.launch(SCAN, 1, SCAN_THREADS, (starts, counts, blocks, E))
        dev.launch(PLACE, blocks, THREADS, (order, place, chosen, counts, R, E, CHUNK))


def gather_rows(dev: Device, out: Tensor, x: Tensor, place: Tensor) -> None:
    """out[place[s, k]] = x[s]. Its backward is `combine` without weights.

    Args (X is BF16, F32 or fp8 codes):
        out    out  X   (R, C)   R = S * top_k; C a multiple of 8, of codes 16
        x      in   X   (S, C)
        place  in   I32 (S, top_k)  as sort_rows has it
    """
    op = "gather_rows"
    S, C = _rows(op, dev, "x", x, VECTOR_BYTES if x.dtype in FP8 else WIDTH)
    top_k = _choices(op, S, place)
    expect(op, "out", out, x.dtype, (S * top_k, C))
    warps = S * ceil_div(C * x.dtype.itemsize, PIECE_BYTES)
    args = (out, x, place, S, C, top_k)
    dev.launch(GATHER, ceil_div(warps, THREADS // WARP), THREADS, args)


def combine(
    dev: Device,
    out: Tensor,
    y: Tensor,
    place: Tensor,
    weights: Tensor | None = None,
    addend: Tensor | None = None,
) -> None:
    """out[s] = sum over k of weights[s, k] * y[place[s, k]] [+ addend[s]].

    Summed in F32 from k = 0 on, the addend last, and rounded once.

    Args (X is BF16 or F32):
        out      out  X   (S, C)       C a multiple of 8
        y        in   X   (R, C)
        place    in   I32 (S, top_k)   as sort_rows has it
        weights  in   F32 (S, top_k)   or None: 1
        addend   in   X   (S, C)       or None; may be out
    """
    op = "combine"
    S, C = _rows(op, dev, "out", out)
    top_k = _choices(op, S, place)
    expect(op, "y", y, out.dtype, (S * top_k, C))
    if weights is not None:
        expect(op, "weights", weights, F32, (S, top_k))
    if addend is not None:
        expect(op, "addend", addend, out.dtype, (S, C))
    warps = S * ceil_div(C, SLICE)
    args = (out, y, place, weights, addend, S, C, top_k)
    dev.launch(COMBINE, ceil_div(warps, THREADS // WARP), THREADS, args)


def combine_backward(
    dev: Device,
    d_y: Tensor,
    d_weights: Tensor,
    y: Tensor,
    place: Tensor,
    weights: Tensor,
    weighted: Tensor | None = None,
) -> None:
    """The gradients of weighted rows and of weights, from d_y without them: at r = place[s, k]

        d_weights[s, k] = d_y[r] . y[r]
        d_y[r] *= weights[s, k]              weighted[r] = weights[s, k] * y[r]

    If y is what combine reads, d_y is what gather_rows makes of the gradient of its result. A
    linear function may stand between both: then y is in front of it, and nobody needs its result.

    Args (X is BF16 or F32):
        d_y        inout  X   (R, C)       C a multiple of 8
        d_weights  out    F32 (S, top_k)
        y          in     X   (R, C)
        place      in     I32 (S, top_k)   as sort_rows has it
        weights    in     F32 (S, top_k)
        weighted   out    X   (R, C)       or None; may be y
    """
    op = "combine_backward"
    R, C = _rows(op, dev, "d_y", d_y)
    S, _ = _matrix(op, "place", place)
    top_k = _choices(op, S, place)
    for name, tensor in (("d_y", d_y), ("y", y), ("weighted", weighted)):
        if tensor is not None:
            expect(op, name, tensor, d_y.dtype, (S * top_k, C))
    expect(op, "d_weights", d_weights, F32, (S, top_k))
    expect(op, "weights", weights, F32, (S, top_k))
    args = (d_y, d_weights, weighted, y, place, weights, S, C, top_k)
    dev.launch(COMBINE_BACKWARD, ceil_div(R, THREADS // WARP), THREADS, args)


def sum_rows(
    dev: Device,
    target: Accumulator,
    x: Tensor,
    starts: Tensor,
    weights: Tensor | None = None,
    order: Tensor | None = None,
) -> None:
    """target[e] (C) = or += the sum of x's rows of expert e: a bias's gradient.

    Without rows it becomes 0, or stays as it is. Sums are F32, and rounded once: stochastically
    where they are added to a BF16 gradient.

    Args (X is BF16 or F32, G is BF16 or F32):
        target  inout  Accumulator G (E, C)
        x       in     X   (R, C)      C a multiple of 8
        starts  in     I32 (E + 1,)    as sort_rows has it
        weights in     F32 (S, top_k)  or None: 1; of row r that of order[r]
        order   in     I32 (R,)        with weights, as sort_rows has it
    """
    op = "sum_rows"
    R, C = _rows(op, dev, "x", x)
    E = starts.size - 1
    if weights is not None:
        expect(op, "weights", weights, F32, weights.shape)
        expect(op, "order", order, I32, (R,))
    expect_accumulator(op, "target", target, (E, C))
    expect(op, "starts", starts, I32, (E + 1,))
    tensor, accumulate, scalars, salt = target
    args = (tensor, x, weights, order, scalars, starts, C, E, int(accumulate), salt)
    dev.launch(SUM, (ceil_div(C, SLICE), E), THREADS, args)


def _matrix(op: str, name: str, tensor: Tensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise ValueError(f"{op}: {name} must have 2 dimensions, got {tensor.shape}")
    return tensor.shape


def _rows(op: str, dev: Device, name: str, x: Tensor, multiple: int = WIDTH) -> tuple[int, int]:
    if multiple == WIDTH:
        expect_float(op, name, x)
    S, C = _matrix(op, name, x)
    expect_multiple(op, dev, f"{name}'s columns", C, multiple)
    return S, C


def _choices(op: str, rows: int, place: Tensor) -> int:
    _, top_k = _matrix(op, "place", place)
    expect(op, "place", place, I32, (rows, top_k))
    if top_k > MAX_CHOICES:
        raise ValueError(f"{op}: at most {MAX_CHOICES} experts of a row, got {top_k}")
    return top_k
