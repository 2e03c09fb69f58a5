"""What the launchers of several operations share: rows spread over warps, sums over rows."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.dtypes import BF16, F32
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect
from llmq.runtime.tensor import Accumulator, Tensor

WARP = 32
VECTOR_BYTES = 16  # of one load or store
MAX_COLUMNS = 8192

# Warps of a block where a row needs fewer, as the kernels have them. Forward passes take many small
# blocks; backward passes take few large ones, because every block leaves a row of partial sums.
FORWARD_WARPS, BACKWARD_WARPS = 4, 8

# column_sum of cu/common.cuh: columns and threads of one block.
COLUMN_SUM_COLUMNS, COLUMN_SUM_THREADS = 32, 1024


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One row lives in the registers of `warps` warps, `vectors` 16-byte vectors in each lane."""

    warps: int
    vectors: int

    @property
    def consts(self) -> dict[str, int]:
        """The layout as the kernels' compile-time constants."""
        return {"WARPS": self.warps, "VECTORS": self.vectors}

    def launch(self, rows: int, block_warps: int, max_blocks: int) -> tuple[int, int]:
        """(blocks, threads of one) to loop over this many rows, several at a time if they fit."""
        block_rows = max(1, block_warps // self.warps)
        return min(ceil_div(rows, block_rows), max_blocks), WARP * self.warps * block_rows


# For entries that do not depend on it: they are compiled once, not for every layout.
ANY_LAYOUT = RowLayout(warps=1, vectors=1)


def row_layout(columns: int, itemsize: int, lane_vectors: int) -> RowLayout:
    """The layout for rows of this many elements: the fewest warps that hold one, a power of 2.

    lane_vectors: how many vectors of a row a lane has registers for.
    """
    vectors = columns * itemsize // VECTOR_BYTES
    warps = 1
    while warps * WARP * lane_vectors < vectors:
        warps *= 2
    return RowLayout(warps, ceil_div(vectors, warps * WARP))


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


def expect_head_dim(op: str, dev: Device, head_dim: int, multiple: int, most: int) -> None:
    """Raise ValueError for a head size whose vectors and tiles a GPU kernel cannot form.

    The CPU's references take any size.
    """
    on_gpu = dev.spec.capability > 0
    if on_gpu and (head_dim % multiple or head_dim > most):
        raise ValueError(
            f"{op}: Hd must be a multiple of {multiple} up to {most} on a GPU, got {head_dim}"
        )


def abs_max_consts(op: str, abs_max: Tensor | None) -> dict[str, int]:
    """The constant that switches a kernel's optional result abs_max, F32 (1,), on or off.

    Raises TypeError or ValueError if the tensor is not one.
    """
    if abs_max is not None:
        expect(op, "abs_max", abs_max, F32, (1,))
    return {"ABS_MAX": int(abs_max is not None)}
