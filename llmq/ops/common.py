"""What the launchers of several operations share: rows spread over warps, sums over rows."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.dtypes import BF16, F32
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div
from llmq.runtime.tensor import Accumulator, Tensor

WARP = 32
VECTOR_BYTES = 16  # of one load or store
MAX_COLUMNS = 8192
BLOCK_WARPS = 8

# column_sum of cu/common.cuh: columns and threads of one block.
COLUMN_SUM_COLUMNS, COLUMN_SUM_THREADS = 32, 1024


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One row lives in the registers of `warps` warps, `vectors` 16-byte vectors in each lane.

    rows: how many rows a block works on at a time.
    """

    warps: int
    vectors: int
    rows: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * self.warps * self.rows

    @property
    def consts(self) -> dict[str, int]:
        """The layout as the kernels' compile-time constants."""
        return {"WARPS": self.warps, "VECTORS": self.vectors, "ROWS": self.rows}

    def grid(self, rows: int, max_blocks: int) -> int:
        """Blocks that loop over this many rows; max_blocks: as many as run at a time."""
        return min(ceil_div(rows, self.rows), max_blocks)


# For entries that do not depend on it: they are compiled once, not for every layout.
ANY_LAYOUT = RowLayout(warps=1, vectors=1, rows=1)


def row_layout(columns: int, itemsize: int, lane_vectors: int) -> RowLayout:
    """The layout for rows of this many elements: the fewest warps that hold one, a power of 2.

    lane_vectors: how many vectors of a row a lane has registers for.
    """
    vectors = columns * itemsize // VECTOR_BYTES
    warps = 1
    while warps * WARP * lane_vectors < vectors:
        warps *= 2
    return RowLayout(warps, ceil_div(vectors, warps * WARP), max(1, BLOCK_WARPS // warps))


def expect_rows(op: str, name: str, tensor: Tensor) -> tuple[int, int]:
    """(rows, columns) of a tensor that row_layout can hold; TypeError or ValueError if not."""
    if tensor.dtype not in (F32, BF16):
        raise TypeError(f"{op}: {name} must be F32 or BF16, got {tensor.dtype.label}")
    if len(tensor.shape) != 2:
        raise ValueError(f"{op}: {name} must have shape (rows, C), got {tensor.shape}")
    rows, columns = tensor.shape
    if columns % 8 or not 0 < columns <= MAX_COLUMNS:
        raise ValueError(
            f"{op}: C must be a positive multiple of 8, at most {MAX_COLUMNS}, got {columns}"
        )
    return rows, columns


def expect_float(op: str, name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the tensor is F32 or BF16."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {tensor!r}")
    if tensor.dtype not in (F32, BF16):
        raise TypeError(f"{op}: {name} must be F32 or BF16, got {tensor.dtype.label}")


def finish_column_sum(
    dev: Device, kernel: Kernel, target: Accumulator, partial: Tensor, consts: dict[str, int]
) -> None:
    """target (columns,) = or += the sum of partial, F32 (rows, columns), over its rows.

    kernel: an entry that does nothing but column_sum of cu/common.cuh. consts: what its file needs
    to compile.
    """
    rows, columns = partial.shape
    tensor, accumulate, scalars, salt = target
    dev.launch(
        kernel,
        ceil_div(columns, COLUMN_SUM_COLUMNS),
        COLUMN_SUM_THREADS,
        (tensor, partial, scalars, rows, columns, int(accumulate), salt),
        consts=consts,
    )
