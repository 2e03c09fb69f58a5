"""Copies of attention heads between tensors of different layouts, and sums over heads."""

from typing import NamedTuple

from llmq.base.tensor import Tensor
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
PER_THREAD = 8  # elements that a thread computes

_SIZES = "i32 rows, i32 heads, i32 size"
_X = "T[*m] x"
_OF_X = "i64 x_first, i64 x_row, i64 x_head"
_WHERE = "x_first + (rows - 1)*x_row + (heads - 1)*x_head + size <= m"
_GPU = "size % 8, out_first % 8, out_row % 8, x_first % 8, x_row % 8, x_head % 8"
COPY = Kernel(
    "attention/heads.cu",
    "heads_copy",
    f"inout T[*n] out, {_X}, {_SIZES}, i64 out_first, i64 out_row, i64 out_head, {_OF_X}",
    where=f"{_WHERE}, out_first + (rows - 1)*out_row + (heads - 1)*out_head + size <= n",
    gpu=f"{_GPU}, out_head % 8",
)
SUM = Kernel(
    "attention/heads.cu",
    "heads_sum",
    f"inout T[*n] out, {_X}, {_SIZES}, i64 out_first, i64 out_row, {_OF_X}",
    where=f"{_WHERE}, out_first + (rows - 1)*out_row + size <= n",
    gpu=_GPU,
)


class Place(NamedTuple):
    """Layout of heads in a tensor, in elements. first: offset of the first head. row, head:
    distances from row to row and from head to head; head 0: all heads are the same elements."""

    first: int
    row: int
    head: int


def copy(
    dev: Device, out: Tensor, x: Tensor, rows: int, heads: int, size: int, to: Place, of: Place
) -> None:
    """out[to.first + r to.row + h to.head + c] = x[of.first + r of.row + h of.head + c].

    r < rows, h < heads, c < size. Other elements of out stay as they are. out, x: tensors of any
    shape and one dtype that share no memory.
    """
    blocks = ceil_div(rows * heads * size, THREADS * PER_THREAD)
    args = (out, x, rows, heads, size, *to, *of)
    dev.launch(COPY, blocks, THREADS, args, cost=BESIDE_ATTENTION)


def add_up(
    dev: Device, out: Tensor, x: Tensor, rows: int, heads: int, size: int, to: Place, of: Place
) -> None:
    """out[to.first + r to.row + c] = the sum over h of x[of.first + r of.row + h of.head + c].

    The heads are added in F32, one after the other, and each sum is rounded once. Arguments: see
    `copy`.
    """
    blocks = ceil_div(rows * size, THREADS * PER_THREAD)
    args = (out, x, rows, heads, size, *to[:2], *of)
    dev.launch(SUM, blocks, THREADS, args, cost=BESIDE_ATTENTION)
