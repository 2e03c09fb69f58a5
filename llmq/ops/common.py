"""Functions that the launchers of several operations share: rows spread over warps, sums over
rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from llmq.base.dtypes import (
    BF16,
    E4M3,
    E5M2,
    F32,
    FP8,
    I32,
    STEP_SCALARS_WORDS,
)
from llmq.base.operand import CODES_MULTIPLE, Fp8Out, ProductCodes
from llmq.base.tensor import Accumulator, Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

WARP = 32
VECTOR_BYTES = 16  # of one load or store
MAX_COLUMNS = 8192

# Warps of a block where a row needs fewer, as the kernels have them. Forward passes take many small
# blocks; backward passes take few large ones, because every block leaves a row of partial sums.
FORWARD_WARPS, BACKWARD_WARPS = 4, 8

# Products of our own in instructions that only these tensor cores have
# (cu/product/product_sm90.cuh).
CAPABILITY = 90
GENERIC_FP8 = (89, 120, 121)
"""Capabilities of the other GPUs on which kernels of ours multiply fp8 codes: before Ada none does,
and between Ada and consumers' Blackwell in other instructions."""
MULTIPLE = 16  # bytes: of rows of all their matrices
SCALE_BLOCK = 128  # elements that share the scale of an 8-bit moment
TILE_ROWS = 256  # of a tile of a cluster of two blocks
NARROW, WIDE = 192, 224  # columns of a tile
STORED_ALONE = 448  # bytes of a row of a, which would be multiplied while a wide tile is stored

# column_sum of cu/pointwise/reduce.cu: threads of a block, rows of a warp before several share
# columns.
COLUMN_SUM_THREADS, COLUMN_SUM_ROWS = 1024, 8


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


@cache
def row_layout(columns: int, itemsize: int, lane_vectors: int) -> RowLayout:
    """The layout for rows of this many elements: the fewest warps that hold one, a power of 2.
    lane_vectors: how many vectors of a row a lane has registers for."""
    vectors = columns * itemsize // VECTOR_BYTES
    warps = 1
    while warps * WARP * lane_vectors < vectors:
        warps *= 2
    return RowLayout(warps, ceil_div(vectors, warps * WARP))


def expect_float(op: str, name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the tensor is F32 or BF16."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {tensor!r}")
    if tensor.dtype not in (F32, BF16):
        raise TypeError(f"{op}: {name} must be F32 or BF16, got {tensor.dtype.label}")


# The kernels of a bias: one compilation defines the types of both, so that they are declared
# together. The second one finishes the sums of all operations whose blocks leave partial sums.
BIAS_BACKWARD = Kernel(
    "pointwise/reduce.cu",
    "bias_backward",
    "out f32[splits,N] partial, T[*rows,N] d_out, i64 rows, i32 N, i32 splits",
)
COLUMN_SUM = Kernel(
    "pointwise/reduce.cu",
    "column_sum",
    "inout G[columns] d, f32[rows,columns] partial, i32[16] scalars, i32 rows, i32 columns, "
    "i32 accumulate, u32 salt",
)


def expect_accumulator(
    op: str, name: str, target: Accumulator | None, shape: tuple[int, ...]
) -> None:
    """Raise TypeError or ValueError unless the gradient, where one is wanted, has this shape."""
    if target is not None:
        expect_float(op, name, target.tensor)
        expect(op, name, target.tensor, None, shape)
        expect(op, "scalars", target.scalars, I32, (STEP_SCALARS_WORDS,))


def finish_column_sum(dev: Device, target: Accumulator | None, partial: Tensor) -> None:
    """target (columns,) = or += the sum of partial, F32 (rows, columns), over its rows. target
    None: nothing, because nobody wants it."""
    if target is None:
        return
    rows, columns = partial.shape
    tensor, accumulate, scalars, salt = target
    groups = min(32, 1 << (ceil_div(rows, COLUMN_SUM_ROWS) - 1).bit_length())
    dev.launch(
        COLUMN_SUM,
        ceil_div(columns, COLUMN_SUM_THREADS // groups),
        COLUMN_SUM_THREADS,
        (tensor, partial, scalars, rows, columns, int(accumulate), salt),
    )


def expect_multiple(op: str, dev: Device, name: str, size: int, multiple: int) -> None:
    """Raise ValueError for a size that GPU kernels cannot cut into vectors. The CPU's references
    take any size."""
    if dev.spec.capability > 0 and size % multiple:
        raise ValueError(f"{op}: {name} must be a multiple of {multiple} on a GPU, got {size}")


def expect_columns(op: str, dev: Device, name: str, columns: int) -> None:
    """Raise ValueError for rows that GPU kernels cannot hold in registers."""
    if dev.spec.capability > 0 and columns > MAX_COLUMNS:
        raise ValueError(f"{op}: {name} must be at most {MAX_COLUMNS} on a GPU, got {columns}")
    expect_multiple(op, dev, name, columns, 8)


def abs_max_consts(abs_max: Tensor | None) -> dict[str, int]:
    """The constant that switches a kernel's optional result abs_max, F32 (1,), on or off."""
    return {"ABS_MAX": int(abs_max is not None)}


ROWS_MULTIPLE = 4  # of matrices with transposed codes: a thread turns four rows


def declared_fp8(rows: str, features: str) -> str:
    """The end of the arguments of a kernel with an optional FP8 result, of these dimensions;
    fp8_args() are the values."""
    return (
        f"out Q[{rows},{features}]? codes, out Q[{features},padded({rows})]? transposed, "
        "f32[1]? scale, inout i32[1]? saturated"
    )


def fp8_args(fp8: Fp8Out | None) -> tuple[Tensor | None, ...]:
    """The arguments that declared_fp8() declares."""
    return (None,) * 4 if fp8 is None else tuple(fp8)


def fp8_consts(
    op: str, fp8: Fp8Out | None, rows: int, features: int, name: str = "fp8"
) -> dict[str, int]:
    """The constants that switch a kernel's two optional FP8 results on or off. Raises TypeError or
    ValueError for what declared_fp8() does not say: neither result, or sizes that have no codes."""
    if fp8 is None:
        return {"CODES": 0, "TRANSPOSED": 0}
    if fp8.codes is None and fp8.transposed is None:
        raise TypeError(f"{op}: {name}.codes or {name}.transposed must be a tensor, both are None")
    if features % CODES_MULTIPLE or (fp8.transposed is not None and rows % ROWS_MULTIPLE):
        raise ValueError(
            f"{op}: FP8 results have features in multiples of {CODES_MULTIPLE}, and transposed "
            f"rows of {ROWS_MULTIPLE}, got ({rows}, {features})"
        )
    return {"CODES": int(fp8.codes is not None), "TRANSPOSED": int(fp8.transposed is not None)}


# -- Kernels that read what a product has written as FP8 -------------------------------------------

# The end of their arguments; product_args() are the values.
PRODUCT_ARGS = (
    "f32[1]? in_scale, f32[1]? in_largest, inout f32[1]? in_abs_max, inout i32[1]? in_saturated"
)


def product_args(product: ProductCodes | None) -> tuple[Tensor | None, ...]:
    """The arguments that PRODUCT_ARGS declares."""
    if product is None:
        return (None,) * 4
    largest = product.largest if product.abs_max is not None else None
    return (product.scale, largest, product.abs_max, product.saturated)


# -- Kernels that are an activation's backward, and write what forward has made of its input again -

NOT_AGAIN = {"OUT": 0, "OUT_TRANSPOSED": 0}  # the constants of again_consts for their forward


def declared_again(rows: str, features: str) -> str:
    """The end of their arguments, of results with these dimensions; again_args() are the values."""
    return (
        f"out T[*{rows},{features}]? out, out O[{features},padded({rows})]? out_transposed, "
        "f32[1]? out_scale, inout i32[1]? out_saturated"
    )


def again_args(out: Tensor | None, out_fp8: Fp8Out | None) -> tuple[Tensor | None, ...]:
    """The arguments that declared_again() declares."""
    return (out, *fp8_args(out_fp8)[1:])


def again_consts(op: str, out: Tensor | None, out_fp8: Fp8Out | None) -> dict[str, int]:
    """The constants that switch forward's result, or its transposed codes, on or off. Raises
    TypeError for both, or for other codes."""
    if out is not None and out_fp8 is not None:
        raise TypeError(f"{op}: out and out_fp8 are both given, only one of them can be written")
    if out_fp8 is not None and (out_fp8.codes is not None or out_fp8.transposed is None):
        raise TypeError(f"{op}: out_fp8 must have transposed alone, codes must be None")
    return {"OUT": int(out is not None), "OUT_TRANSPOSED": int(out_fp8 is not None)}


# -- Kernels of adapters of rows of a matrix ------------------------------------------------------

MAX_SPANS = 4
COLUMN_MULTIPLE = 8  # 16-byte rows of BF16, as fast products want them

Spans = Sequence[tuple[int, int]]
"""Rows [start, stop) of a matrix that have an adapter each, in ascending order, none empty."""


def padded_columns(count: int, rank: int) -> int:
    """Columns of the matrix of so many adapters."""
    return ceil_div(count * rank, COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def expect_spans(op: str, spans: Spans, rows: int) -> None:
    """ValueError unless these are spans of a matrix with so many rows."""
    if not 1 <= len(spans) <= MAX_SPANS:
        raise ValueError(f"{op}: spans must be 1 to {MAX_SPANS}, got {len(spans)}")
    edges = [0, *chain(*spans), rows]
    if edges != sorted(edges) or any(start == stop for start, stop in spans):
        raise ValueError(f"{op}: spans must ascend within {rows} rows, none empty, got {spans}")


# -- Kernels that work in OctetTiles --------------------------------------------------------------

OCTET_TILE = (128, 64)  # rows and columns of a block; OctetTile in cu/fp8.cuh


def octet_tiles(rows: int, columns: int) -> tuple[int, int]:
    """Blocks of a kernel that works in OctetTiles: across, down."""
    return ceil_div(columns, OCTET_TILE[1]), ceil_div(rows, OCTET_TILE[0])


# -- What launchers of products check --------------------------------------------------------------


def expect_scales(
    op: str, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None
) -> None:
    """Raise TypeError unless operands of a product have scales if they are fp8 codes, and only
    then; and for codes that are both E5M2."""
    if a.dtype is b.dtype is E5M2:
        raise TypeError(f"{op}: a or b must be {E4M3.label}, both are {E5M2.label}")
    if not (a.dtype in FP8) is (scale_a is not None) is (scale_b is not None):
        raise TypeError(f"{op}: fp8 codes have scales, and only they")


def expect_scale(op: str, name: str, moment: Tensor, scale: Tensor | None) -> None:
    """Raise TypeError unless a moment has scales if it is E4M3, and only then."""
    if (moment.dtype is E4M3) != (scale is not None):
        given = "given" if scale is None else "None"
        raise TypeError(f"{op}: {name}_scale must be {given}, {name} is {moment.dtype.label}")


class Tiles(NamedTuple):
    """Those of a result (M, N), in so many columns, on so many clusters of two blocks."""

    M: int
    N: int
    columns: int
    clusters: int

    @classmethod
    def of(cls, dev: Device, M: int, N: int, columns: int = NARROW) -> Tiles:
        """On all multiprocessors."""
        return cls(M, N, columns, dev.spec.num_sms // 2)

    @property
    def count(self) -> int:
        """Tiles of the result."""
        return ceil_div(self.M, TILE_ROWS) * ceil_div(self.N, self.columns)

    @property
    def computed(self) -> int:
        """Tiles that all clusters could compute in the turns that they take."""
        return ceil_div(self.count, self.clusters) * self.clusters

    @property
    def idle(self) -> float:
        """The share of what all clusters could compute that is no result; the result is 1."""
        return self.computed * TILE_ROWS * self.columns / (self.M * self.N) - 1


def tile_columns(dev: Device, M: int, N: int, row_bytes: int) -> int:
    """The columns of tiles with which `adapted` takes the least time. row_bytes: of a row of a.
    Turns of all clusters take as long as tiles are wide and K is long. While narrow tiles are
    stored, others are multiplied; while wide ones are, nothing is."""

    def seconds(columns: int) -> int:  # in no unit
        alone = STORED_ALONE if columns == WIDE else 0
        return Tiles.of(dev, M, N, columns).computed * columns * (row_bytes + alone)

    return min((NARROW, WIDE), key=seconds)


CHUNK = 64
"""Tokens of a chunk of linear attention over states."""


class Heads(NamedTuple):
    """Heads of linear attention over states. Hk: of queries and keys, DK channels each. Hv: of
    values and states, DV channels each."""

    Hk: int
    Hv: int
    DK: int
    DV: int

    @property
    def channels(self) -> int:
        """Those of queries, keys and values together."""
        return 2 * self.Hk * self.DK + self.Hv * self.DV
