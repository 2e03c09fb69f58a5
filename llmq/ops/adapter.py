"""Low-rank adapters of rows of a matrix: their B as one matrix, and its gradient in parts.

The adapters of a fused matrix, such as those of queries, keys and values, share an input, so that
their A lie in one matrix A (n * rank, in_features) below each other. With each B in columns of its
own, h = x @ A^T and y += h @ B^T are two products, as for a single adapter:

    rows of q | s_q B_q     0        0    | 0     columns: n * rank, padded to multiples
    rows of k |    0     s_k B_k     0    | 0     of COLUMN_MULTIPLE
    rows of v |    0        0     s_v B_v | 0

With magnitudes (DoRA, Liu et al., arXiv 2402.09353) each adapted row w + s b A of the sum has one
that is trained, and a norm that counts as a constant in backward:

    y_j = m_j / |w_j + s b_j A| * v_j + bias_j        v = x W^T + s h B^T
    d_v_j = d_y_j * m_j / |...|                       d_m_j = the sum of d_y_j * v_j / |...|
"""

from collections.abc import Sequence
from itertools import chain

from llmq.base.dtypes import F32
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    COLUMN_MULTIPLE,
    MAX_SPANS,
    VECTOR_BYTES,
    Spans,
    expect_float,
    expect_spans,
    padded_columns,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
NORM_ROWS = 16  # of a block; NORM_ROWS in cu/adapter.cu

_SCALES = ", ".join(f"f32 scale{i}" for i in range(MAX_SPANS))
_EDGES = ", ".join(f"i64 start{i}, i64 stop{i}" for i in range(MAX_SPANS))
_REST = f"{_SCALES}, i32 rank, i32 columns, i64 rows, i64 period, {_EDGES}"
EXPAND = Kernel("adapter.cu", "adapter_expand", args=f"T* whole, const T* b, {_REST}")
COLLECT = Kernel("adapter.cu", "adapter_collect", args=f"T* b, const T* whole, {_REST}")
NORMS = Kernel(
    "adapter.cu",
    "adapter_norms",
    args=f"f32* norms, const T* w, const T* a, const T* b, {_SCALES}, i32 rank, i64 rows, i32 K, "
    + _EDGES,
)
COLUMNS = Kernel(
    "adapter.cu",
    "adapter_columns",
    args="T* out, const T* x, const T*? y, const f32* norms, const f32*? magnitudes, "
    "const T*? bias, i64 rows, i32 columns",
)


def expand(
    dev: Device, whole: Tensor, b: Tensor, spans: Spans, scales: Sequence[float], groups: int = 1
) -> None:
    """whole = its scale * B of each span in the span's rows and columns of its own, elsewhere zero.

    groups: so many matrices lie below each other in both, each with these spans.

    Args:
        whole   out  T  (rows, columns)   F32 or BF16; columns as padded_columns says
        b       in   T  (n, rank)         of all spans, below each other: n rows together
        spans   1 to 4
        scales  as many

    Cost:    whole written once; one launch. A few megabytes.
    """
    how = (whole.size // COLUMN_MULTIPLE, whole, b, spans, scales, groups)
    _launch(dev, EXPAND, (whole, b), *how)


def collect(
    dev: Device, b: Tensor, whole: Tensor, spans: Spans, scales: Sequence[float], groups: int = 1
) -> None:
    """b = its scale * those elements of `whole` that expand takes from b: its gradient.

    Args: as of expand; b is written.
    """
    _launch(dev, COLLECT, (b, whole), b.size, whole, b, spans, scales, groups)


def norms(
    dev: Device, out: Tensor, w: Tensor, a: Tensor, b: Tensor, spans: Spans, scales: Sequence[float]
) -> None:
    """out = |w + its scale * b a| of each row of a span, in F32, 0 elsewhere.

    Args:
        out     out  F32 (rows,)
        w       in   T   (rows, K)      F32 or BF16
        a       in   T   (columns, K)   as padded_columns says
        b       in   T   (n, rank)      of all spans, below each other: n rows together
        spans   1 to 4
        scales  as many

    Cost:    w read once, and rank multiplications of each of its elements; one launch.
    """
    op = "adapter.norms"
    expect_float(op, "w", w)
    rows, K = w.shape
    expect_spans(op, spans, rows)
    rank = b.shape[1]
    expect(op, "out", out, F32, (rows,))
    expect(op, "b", b, w.dtype, (sum(stop - start for start, stop in spans), rank))
    expect(op, "a", a, w.dtype, (padded_columns(len(spans), rank), K))
    missing = MAX_SPANS - len(spans)
    sizes = (*map(float, scales), *(0.0,) * missing, rank, rows, K)
    sizes += (*chain(*spans), *(0,) * (2 * missing))
    dev.launch(NORMS, ceil_div(rows, NORM_ROWS), THREADS, (out, w, a, b, *sizes))


def scale(
    dev: Device,
    out: Tensor,
    x: Tensor,
    norms: Tensor,
    magnitudes: Tensor,
    bias: Tensor | None = None,
) -> None:
    """out = x * magnitudes / norms + bias, column by column; without the factor where norms are 0.

    Args:
        out         out  T   (rows, columns)   F32 or BF16; may be x. A row is whole 16 bytes
        x           in   T   (rows, columns)
        norms       in   F32 (columns,)        of `norms`
        magnitudes  in   F32 (columns,)
        bias        in   T   (columns,)        or None
    """
    _columns(dev, "adapter.scale", out, x, None, norms, magnitudes, bias)


def magnitude_gradient(dev: Device, out: Tensor, x: Tensor, y: Tensor, norms: Tensor) -> None:
    """out = x * y / norms, column by column, 0 where norms are 0: the terms of d_m, of d_y and v.

    Args: as of scale; y is like x.
    """
    _columns(dev, "adapter.magnitude_gradient", out, x, y, norms, None, None)


def _columns(
    dev: Device,
    op: str,
    out: Tensor,
    x: Tensor,
    y: Tensor | None,
    norms: Tensor,
    magnitudes: Tensor | None,
    bias: Tensor | None,
) -> None:
    expect_float(op, "x", x)
    rows, columns = x.shape
    if columns * x.dtype.itemsize % VECTOR_BYTES:
        raise ValueError(f"{op}: a row must be a multiple of {VECTOR_BYTES} bytes: {x!r}")
    for name, tensor in {"out": out, "y": y}.items():
        if tensor is not None:
            expect(op, name, tensor, x.dtype, x.shape)
    for name, tensor, dtype in (
        ("norms", norms, F32), ("magnitudes", magnitudes, F32), ("bias", bias, x.dtype),
    ):  # fmt: skip
        if tensor is not None:
            expect(op, name, tensor, dtype, (columns,))
    blocks = ceil_div(x.size * x.dtype.itemsize, VECTOR_BYTES * THREADS)
    dev.launch(COLUMNS, blocks, THREADS, (out, x, y, norms, magnitudes, bias, rows, columns))


def _launch(
    dev: Device,
    kernel: Kernel,
    tensors: tuple[Tensor, Tensor],
    threads: int,
    whole: Tensor,
    b: Tensor,
    spans: Spans,
    scales: Sequence[float],
    groups: int,
) -> None:
    expect_float("adapter", "whole", whole)
    rows, period = whole.shape[0], whole.shape[0] // groups
    expect_spans("adapter", spans, period)
    count, rank = sum(stop - start for start, stop in spans), b.shape[1]
    expect("adapter", "b", b, whole.dtype, (groups * count, rank))
    columns = padded_columns(len(spans), rank)
    expect("adapter", "whole", whole, None, (groups * period, columns))
    missing = MAX_SPANS - len(spans)
    sizes = (*map(float, scales), *(0.0,) * missing, rank, columns, rows, period)
    sizes += (*chain(*spans), *(0,) * (2 * missing))
    dev.launch(kernel, ceil_div(threads, THREADS), THREADS, (*tensors, *sizes))
