"""Low-rank adapters of rows of a matrix: their B as one matrix, and its gradient in parts.

The adapters of a fused matrix, such as those of queries, keys and values, share an input, so that
their A lie in one matrix A (n * rank, in_features) below each other. With each B in columns of its
own, h = x @ A^T and y += h @ B^T are two products, as for a single adapter:

    rows of q | s_q B_q     0        0    | 0     columns: n * rank, padded to multiples
    rows of k |    0     s_k B_k     0    | 0     of COLUMN_MULTIPLE
    rows of v |    0        0     s_v B_v | 0
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Tensor
from llmq.ops.common import COLUMN_MULTIPLE, MAX_SPANS, Spans, expect_spans, padded_columns
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256

_REST = ", ".join(f"f32 scale{i}" for i in range(MAX_SPANS))
_REST += ", i32 rank, i32 columns, i64 rows, i64 period, "
_REST += ", ".join(f"i64 start{i}, i64 stop{i}" for i in range(MAX_SPANS))
EXPAND = Kernel("adapter.cu", "adapter_expand", args=f"T* whole, const T* b, {_REST}")
COLLECT = Kernel("adapter.cu", "adapter_collect", args=f"T* b, const T* whole, {_REST}")


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
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape or spans.
    """
    how = (whole.size // COLUMN_MULTIPLE, whole, b, spans, scales, groups)
    _launch(dev, EXPAND, (whole, b), *how)


def collect(
    dev: Device, b: Tensor, whole: Tensor, spans: Spans, scales: Sequence[float], groups: int = 1
) -> None:
    """b = its scale * those elements of `whole` that expand takes from b: its gradient.

    Args: as of expand; b is written.

    Cost:    b written once, as much read; one launch.
    Raises:  as expand.
    """
    _launch(dev, COLLECT, (b, whole), b.size, whole, b, spans, scales, groups)


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
    if whole.dtype not in (F32, BF16):
        raise TypeError(f"adapter: whole must be F32 or BF16, got {whole.dtype.label}")
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
