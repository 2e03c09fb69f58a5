"""Rows of a micro-batch sorted by expert, and the sum of experts' outputs for each row.

A row goes to top_k experts, so S rows make R = S * top_k choices: choice s * top_k + k is the k-th
of row s. Choices sorted by expert, then by number, are the rows of the experts' products. No choice
is dropped.
"""

from llmq.base.dtypes import I32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import VECTOR_BYTES, WARP
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS, SCAN_THREADS = 256, 1024
MAX_EXPERTS = 512
CHUNK = 2048  # choices that a block sorts
WIDTH, SLICE = 8, 32 * 8  # columns of a lane and of a warp
PIECE_BYTES = 32 * 4 * VECTOR_BYTES  # bytes of a row that a warp of GATHER copies
MAX_CHOICES = 32

COUNT = Kernel(
    "experts/expert_rows.cu",
    "rows_count",
    "out i32[blocks,E] counts, i32[*n] chosen, i32 n, i32 E, i32 chunk",
    where=f"E >= 1, E <= {MAX_EXPERTS}",
)
SCAN = Kernel(
    "experts/expert_rows.cu",
    "rows_scan",
    "out i32[E+1] starts, inout i32[blocks,E] counts, i32 blocks, i32 E",
)
PLACE = Kernel(
    "experts/expert_rows.cu",
    "rows_place",
    "out i32[n] order, out i32[S,top_k] place, i32[S,top_k] chosen, i32[blocks,E] counts, i32 n, "
    "i32 E, i32 chunk",
)
GATHER = Kernel(
    "experts/expert_rows.cu",
    "rows_gather",
    "out Q[rows*top_k,C] out, Q[rows,C] x, i32[rows,top_k] place, i32 rows, i32 C, i32 top_k",
    where=f"top_k <= {MAX_CHOICES}",
    gpu="C % max(8, vector_Q)",
    types="Q=f32|bf16|e4m3|e4m3_half|e5m2",
)
COMBINE = Kernel(
    "experts/expert_rows.cu",
    "rows_combine",
    "out T[rows,C] out, T[rows*top_k,C] y, i32[rows,top_k] place, f32[rows,top_k]? weights, "
    "T[rows,C]? addend, i32 rows, i32 C, i32 top_k",
    where=f"top_k <= {MAX_CHOICES}",
    gpu="C % 8",
)
COMBINE_BACKWARD = Kernel(
    "experts/expert_rows.cu",
    "rows_combine_backward",
    "inout T[rows*top_k,C] d_y, out f32[rows,top_k] d_weights, out T[rows*top_k,C]? weighted, "
    "T[rows*top_k,C] y, i32[rows,top_k] place, f32[rows,top_k] weights, i32 rows, i32 C, i32 top_k",
    where=f"top_k <= {MAX_CHOICES}",
    gpu="C % 8",
)
SUM = Kernel(
    "experts/expert_rows.cu",
    "rows_sum",
    "inout G[E,C] d_sum, T[R,C] x, f32[S,top_k]? weights, i32[R]? order, i32[16] scalars, "
    "i32[E+1] starts, i32 C, i32 E, i32 accumulate, u32 salt",
    where="R == S*top_k",
    gpu="C % 8",
)


def sort_rows(dev: Device, order: Tensor, place: Tensor, starts: Tensor, chosen: Tensor) -> None:
    """Sort choices by expert, stably.

    order: I32 (R,), the choice at each place. place: I32 (S, top_k), the place of each choice.
    starts: I32 (E+1,), expert e has places [starts[e], starts[e + 1]). chosen: I32 (S, top_k),
    experts in [0, E), not checked.

    Cost:    about four times chosen's bytes, in three launches; E bytes of scratch for 512 choices.
    """
    (S, top_k), E = PLACE.dims(chosen=chosen), starts.size - 1
    R = S * top_k
    blocks = ceil_div(R, CHUNK)
    with dev.scratch("rows by block and expert", (blocks, E), I32) as counts:
        dev.launch(COUNT, blocks, THREADS, (counts, chosen, R, E, CHUNK))
        dev.launch(SCAN, 1, SCAN_THREADS, (starts, counts, blocks, E))
        dev.launch(PLACE, blocks, THREADS, (order, place, chosen, counts, R, E, CHUNK))


def gather_rows(dev: Device, out: Tensor, x: Tensor, place: Tensor) -> None:
    """out[place[s, k]] = x[s]. Backward is `combine` without weights. place: see sort_rows."""
    S, C, top_k = GATHER.dims(x=x, place=place)
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

    The terms are added in F32 from k = 0 on, the addend last, and the sum is rounded once.

    place: see sort_rows. weights: F32; None: all are 1. addend: may be out.
    """
    S, C, top_k = COMBINE.dims(out=out, place=place)
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
    """Gradients of weights and of y, with r = place[s, k] and the dot product of two rows:

        d_weights[s, k] = d_y[r] . y[r]
        d_y[r] *= weights[s, k]              weighted[r] = weights[s, k] * y[r]

    y: combine's input. d_y: on entry gather_rows(gradient of combine's output). If combine reads
    f(y) for a linear function f, d_y is on entry the result of f's backward.

    place: see sort_rows. weighted: may be y.
    """
    S, top_k, C = COMBINE_BACKWARD.dims(place=place, y=y)
    args = (d_y, d_weights, weighted, y, place, weights, S, C, top_k)
    dev.launch(COMBINE_BACKWARD, ceil_div(S * top_k, THREADS // WARP), THREADS, args)


def sum_rows(
    dev: Device,
    target: Accumulator,
    x: Tensor,
    starts: Tensor,
    weights: Tensor | None = None,
    order: Tensor | None = None,
) -> None:
    """target[e] (C,) = or += sum of x's rows of expert e, for the gradient of a bias.

    An expert without rows gets 0, or keeps target if it accumulates. Sums are F32, rounded once:
    stochastically if added to a BF16 gradient.

    starts, order: see sort_rows. weights: F32 (S, top_k), row r has the weight of choice order[r];
    None: all are 1.
    """
    (_, C), E = SUM.dims(x=x), starts.size - 1
    tensor, accumulate, scalars, salt = target
    args = (tensor, x, weights, order, scalars, starts, C, E, int(accumulate), salt)
    dev.launch(SUM, (ceil_div(C, SLICE), E), THREADS, args)
