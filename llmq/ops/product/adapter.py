"""Low-rank adapters of rows of a matrix: all B matrices as one matrix, and its gradient.

Adapters of a fused matrix, such as queries, keys and values, share an input, so that all A lie
below each other in one matrix (n * rank, in_features). Each B has columns of its own in one matrix,
so that all adapters need two products, h = x @ A^T and y += h @ B^T, as a single adapter does:

    rows of q | s_q B_q     0        0    | 0     columns: n * rank, padded to multiples
    rows of k |    0     s_k B_k     0    | 0     of COLUMN_MULTIPLE
    rows of v |    0        0     s_v B_v | 0

With magnitudes (DoRA, Liu et al., arXiv 2402.09353) each adapted row w + s b A has a trained
magnitude m, and a norm, which backward treats as a constant:

    y_j = m_j / |w_j + s b_j A| * v_j + bias_j        v = x W^T + s h B^T
    d_v_j = d_y_j * m_j / |...|                       d_m_j = the sum of d_y_j * v_j / |...|
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

from llmq.base.dtypes import BF16, F32, DType
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    COLUMN_MULTIPLE,
    MAX_SPANS,
    VECTOR_BYTES,
    Spans,
    expect_spans,
    padded_columns,
)
from llmq.runtime.cost import Cost
from llmq.runtime.device import Device, DeviceSpec
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
NORM_ROWS = 16  # rows of a block of NORMS, as in cu/product/adapter.cu

_SCALES = ", ".join(f"f32 scale{i}" for i in range(MAX_SPANS))
_EDGES = ", ".join(f"i64 start{i}, i64 stop{i}" for i in range(MAX_SPANS))
_COUNT = "(" + " + ".join(f"stop{i} - start{i}" for i in range(MAX_SPANS)) + ")"  # rows in spans
_REST = f"{_SCALES}, i32 rank, i32 columns, i64 rows, i64 period, {_EDGES}"
_WHOLE, _B = "T[rows,columns] whole", f"T[rows//period*{_COUNT},rank] b"
EXPAND = Kernel("product/adapter.cu", "adapter_expand", f"out {_WHOLE}, {_B}, {_REST}")
COLLECT = Kernel("product/adapter.cu", "adapter_collect", f"out {_B}, {_WHOLE}, {_REST}")
NORMS = Kernel(
    "product/adapter.cu",
    "adapter_norms",
    f"out f32[rows] norms, T[rows,K] w, T[columns,K] a, T[{_COUNT},rank] b, {_SCALES}, i32 rank, "
    f"i64 rows, i32 K, {_EDGES}",
)
COLUMNS = Kernel(
    "product/adapter.cu",
    "adapter_columns",
    "out T[rows,columns] out, T[rows,columns] x, T[rows,columns]? y, f32[columns] norms, "
    "f32[columns]? magnitudes, T[columns]? bias, i64 rows, i32 columns",
    gpu="columns % vector_T",
)


def expand(
    dev: Device, whole: Tensor, b: Tensor, spans: Spans, scales: Sequence[float], groups: int = 1
) -> None:
    """Write scale * B of each span to the span's rows and columns of `whole`, and zero elsewhere.

    groups: number of matrices below each other in whole and b, each with these spans. b: the B
    matrices of all spans, below each other. whole: has padded_columns() columns.

    Cost:    whole, a few megabytes, written once; one launch.
    """
    blocks = ceil_div(whole.size // COLUMN_MULTIPLE, THREADS)
    sizes = _sizes(whole, b, spans, scales, groups)
    dev.launch(EXPAND, blocks, THREADS, (whole, b, *sizes))


def collect(
    dev: Device, b: Tensor, whole: Tensor, spans: Spans, scales: Sequence[float], groups: int = 1
) -> None:
    """Gradient of expand: b = scale * those elements of `whole` that expand writes from b."""
    sizes = _sizes(whole, b, spans, scales, groups)
    dev.launch(COLLECT, ceil_div(b.size, THREADS), THREADS, (b, whole, *sizes))


def norms(
    dev: Device, out: Tensor, w: Tensor, a: Tensor, b: Tensor, spans: Spans, scales: Sequence[float]
) -> None:
    """out = the norm of each row of w + scale * b a in a span, in F32; 0 for other rows.

    b: the B matrices of all spans, below each other. a: has padded_columns() rows.

    Cost:    w read once, and rank multiplications per element; one launch.
    """
    (rows, K), rank = NORMS.dims(w=w), b.shape[1]
    expect_spans("adapter.norms", spans, rows)
    expect("adapter.norms", "a", a, w.dtype, (padded_columns(len(spans), rank), K))
    args = (out, w, a, b, *_padded_scales(scales), rank, rows, K, *_padded_edges(spans))
    dev.launch(NORMS, ceil_div(rows, NORM_ROWS), THREADS, args)


def scale(
    dev: Device,
    out: Tensor,
    x: Tensor,
    norms: Tensor,
    magnitudes: Tensor,
    bias: Tensor | None = None,
) -> None:
    """out = x * magnitudes / norms + bias in each column, and x + bias in columns with norm 0. out
    may be x."""
    _columns(dev, out, x, None, norms, magnitudes, bias)


def magnitude_gradient(dev: Device, out: Tensor, x: Tensor, y: Tensor, norms: Tensor) -> None:
    """out = x * y / norms in each column, 0 in columns with norm 0. With x = d_y and y = v these
    are the terms of d_m."""
    _columns(dev, out, x, y, norms, None, None)


def _columns(dev: Device, out: Tensor, x: Tensor, *others: Tensor | None) -> None:
    """Launch COLUMNS. others: y, norms, magnitudes, bias."""
    rows, columns = COLUMNS.dims(x=x)
    blocks = ceil_div(x.size * x.dtype.itemsize, VECTOR_BYTES * THREADS)
    dev.launch(COLUMNS, blocks, THREADS, (out, x, *others, rows, columns))


def _sizes(
    whole: Tensor, b: Tensor, spans: Spans, scales: Sequence[float], groups: int
) -> tuple[float, ...]:
    """Arguments of EXPAND and COLLECT after the tensors."""
    rows, period, rank = whole.shape[0], whole.shape[0] // groups, b.shape[1]
    expect_spans("adapter", spans, period)
    columns = padded_columns(len(spans), rank)
    return (*_padded_scales(scales), rank, columns, rows, period, *_padded_edges(spans))


def _padded_scales(scales: Sequence[float]) -> tuple[float, ...]:
    return (*map(float, scales), *(0.0,) * (MAX_SPANS - len(scales)))


def _padded_edges(spans: Spans) -> tuple[int, ...]:
    return (*chain(*spans), *(0,) * (2 * (MAX_SPANS - len(spans))))


# -- Gradients of h and B in one pass over d_out, the largest tensor of both products
#
#    d_h = scale * d_out @ B           d_B = scale * d_out^T @ h

MAX_RANK = 64  # for larger ranks, partial sums would be as large as d_out
MULTIPLE = 8  # divisor of columns, for 16-byte copies of BF16
WARPS = 8
STEP_ROWS = 128  # rows of d_out in a stage of shared memory
FINISH_THREADS = 256
# Compute capabilities, times 10, with at least 163 KiB of shared memory per block; others have 99
# KiB.
LARGE_SHARED = (80, 87, 90, 100, 103, 110)
FULL = 0.75  # share of busy multiprocessors from which memory's whole bandwidth is used

_ENDS = ", ".join(f"i32 end{i}" for i in range(MAX_SPANS))
PARTIALS = Kernel(
    "product/adapter.cu",
    "adapter_backward_partials",
    "out f32[splits,rows,ranks] h_partial, out f32[groups,b_rows,ranks] b_partial, "
    f"bf16[rows,N] d_out, bf16[rows,h_columns] h, bf16[{_COUNT},rank] b, i64 rows, i64 N, "
    f"i32 h_columns, i32 split_columns, {_EDGES}",
)
FINISH = Kernel(
    "product/adapter.cu",
    "adapter_backward_finish",
    "out bf16[rows,h_columns] d_h, inout G[b_rows,rank] d_b, f32[splits,rows,ranks] h_partial, "
    "f32[groups,b_rows,ranks] b_partial, i32[16] scalars, i32 accumulate, u32 salt, f32 scale, "
    f"i64 rows, i32 h_columns, i64 b_rows, i32 groups, {_ENDS}",
)


class Tiles(NamedTuple):
    """Tiles of a thread block. pieces: pieces of 16 rows that a warp computes. chunk: columns that
    a block reads at a time. rank_warps: number of warps that share rows and divide the ranks."""

    pieces: int
    chunk: int
    rank_warps: int

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return 16 * self.pieces * WARPS // self.rank_warps


def _tiles(rank: int) -> tuple[Tiles, ...]:
    """Tiles whose sums fit into registers: first tiles with many rows, then tiles with few rows,
    for small problems."""
    if rank <= 16:
        return Tiles(8, 64, 1), Tiles(2, 64, 1)
    if rank <= 32:
        return Tiles(4, 64, 1), Tiles(2, 64, 1)
    return Tiles(8, 32, 2), Tiles(4, 32, 2)


class Layout(NamedTuple):
    """Grid of PARTIALS. split_columns: columns of a split. ends: index of each span's last split,
    plus 1. groups: number of blocks along rows. ranks: columns of partial sums."""

    tiles: Tiles
    split_columns: int
    ends: tuple[int, ...]
    groups: int
    ranks: int

    def partial_elements(self, rows: int, b_rows: int) -> int:
        """Number of elements of both kinds of partial sums."""
        return self.ranks * (self.ends[-1] * rows + self.groups * b_rows)


def _layout(tiles: Tiles, rows: int, lengths: tuple[int, ...], rank: int, num_sms: int) -> Layout:
    """Layout with the longest splits that still give every multiprocessor a block. lengths: columns
    of each span."""
    groups = ceil_div(rows, tiles.block_rows)
    chunks = [ceil_div(length, tiles.chunk) for length in lengths]
    most = max(len(chunks), num_sms // groups)
    each = ceil_div(sum(chunks), most)
    while sum(ceil_div(n, each) for n in chunks) > most:
        each += 1
    ends = tuple(accumulate(ceil_div(n, each) for n in chunks))
    per_piece = MULTIPLE * tiles.rank_warps
    return Layout(tiles, each * tiles.chunk, ends, groups, ceil_div(rank, per_piece) * per_piece)


@cache
def layout(rows: int, spans: Spans, rank: int, num_sms: int) -> Layout:
    """The layout of least time, estimated from the bytes of d_out and of partial sums."""
    lengths = tuple(stop - start for start, stop in spans)
    b_rows = sum(lengths)

    def cost(choice: Layout) -> float:
        blocks = choice.ends[-1] * choice.groups
        busy = blocks / ceil_div(blocks, num_sms)
        slow = max(1.0, FULL * num_sms / busy)
        return 2 * rows * b_rows * slow + 2 * 4 * choice.partial_elements(rows, b_rows)

    return min((_layout(t, rows, lengths, rank, num_sms) for t in _tiles(rank)), key=cost)


def stages(spec: DeviceSpec, tiles: Tiles) -> int:
    """Number of stages of d_out in shared memory, including the stage in use."""
    if spec.capability not in LARGE_SHARED:
        return 2
    return 5 if tiles.chunk == 64 else 8


def shared_bytes(tiles: Tiles, rank: int, count: int) -> int:
    """Bytes of shared memory of a block: `count` stages, h, b, and sums of warps."""
    units = 2 if rank <= 16 else 4 if rank <= 32 else 8  # groups of 8 ranks in a row of h and b
    steps = tiles.block_rows // STEP_ROWS
    b_slots = (count - 1) // steps + 1
    ring = count * STEP_ROWS * tiles.chunk * BF16.itemsize
    factors = (tiles.block_rows + b_slots * tiles.chunk) * units * MULTIPLE * BF16.itemsize
    return ring + factors + WARPS * tiles.chunk * MULTIPLE * F32.itemsize


def _consts(tiles: Tiles, rank: int, spec: DeviceSpec) -> dict[str, int]:
    """Compile-time constants of PARTIALS and FINISH."""
    return {
        "RANK": rank,
        "BLOCK_ROWS": tiles.block_rows,
        "CHUNK": tiles.chunk,
        "RANK_WARPS": tiles.rank_warps,
        "STAGES": stages(spec, tiles),
    }


def takes(dtype: DType, N: int, spans: Spans, rank: int) -> bool:
    """True if `backward` supports these arguments; else use two products. dtype, N: dtype and
    columns of d_out."""
    aligned = not any(edge % MULTIPLE for edge in (N, *chain(*spans)))
    return dtype == BF16 and rank <= MAX_RANK and aligned


def backward(
    dev: Device,
    d_h: Tensor,
    d_b: Accumulator,
    d_out: Tensor,
    h: Tensor,
    b: Tensor,
    spans: Spans,
    scale: float,
) -> None:
    """For each span d_h = scale * d_out @ B, and d_b = or += scale * d_out^T @ h.

    Sums are added in F32 in a fixed order, scaled, and rounded once. ValueError unless `takes`.

    d_h, h: have padded_columns() columns, zero after the spans' ranks. d_b, b: matrices of all
    spans, below each other. spans: ranges of columns of d_out.

    Cost:    d_out read once; two launches; F32 partial sums, see `layout`, as workspace.
    """
    op, spans = "adapter_backward", tuple(map(tuple, spans))
    (rows, N), (b_rows, rank) = PARTIALS.dims(d_out=d_out), b.shape
    expect_spans(op, spans, N)
    if not takes(BF16, N, spans, rank):
        raise ValueError(
            f"{op}: columns must be multiples of {MULTIPLE} and ranks up to {MAX_RANK}, "
            f"got spans {spans} of {N}, rank {rank}"
        )
    expect(op, "d_b", d_b.tensor, None, b.shape)
    columns = padded_columns(len(spans), rank)
    tiles, split_columns, ends, groups, ranks = layout(rows, spans, rank, dev.num_sms)
    target, accumulate, scalars, salt = d_b
    with (
        dev.scratch("adapter h partial sums", (ends[-1], rows, ranks), F32) as h_partial,
        dev.scratch("adapter b partial sums", (groups, b_rows, ranks), F32) as b_partial,
    ):
        sizes = (rows, N, columns, split_columns, *_padded_edges(spans))
        dev.launch(
            PARTIALS,
            (ends[-1], groups),
            32 * WARPS,
            (h_partial, b_partial, d_out, h, b, *sizes),
            consts=_consts(tiles, rank, dev.spec),
            smem=shared_bytes(tiles, rank, stages(dev.spec, tiles)),
            cost=Cost(flops=4 * rows * b_rows * rank),
        )
        ends = (*ends, *ends[-1:] * (MAX_SPANS - len(spans)))
        sizes = (float(scale), rows, columns, b_rows, groups, *ends)
        dev.launch(
            FINISH,
            ceil_div(d_h.size, FINISH_THREADS) + ceil_div(target.size, FINISH_THREADS),
            FINISH_THREADS,
            (d_h, target, h_partial, b_partial, scalars, int(accumulate), salt, *sizes),
            consts=_consts(_tiles(rank)[0], rank, dev.spec),  # one compilation for all tiles
        )
