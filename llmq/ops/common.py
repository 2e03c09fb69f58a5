"""Constants, declarations and grids that launchers of several operations share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, FP8
from llmq.base.operand import CODES_MULTIPLE, Fp8Out, ProductCodes
from llmq.base.tensor import Accumulator, Tensor
from llmq.runtime.cost import Cost, delta_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

WARP = 32
VECTOR_BYTES = 16  # bytes of one load or store
MAX_COLUMNS = 8192

# Warps of a thread block if a row needs fewer warps. Forward kernels have many small blocks;
# backward kernels have few large blocks, because every block writes a row of partial sums.
FORWARD_WARPS, BACKWARD_WARPS = 4, 8

# Compute capability, times 10, that Hopper's instructions need (cu/product/product_sm90.cuh).
CAPABILITY = 90
GENERIC_FP8 = (89, 120, 121)
"""Compute capabilities, times 10, of GPUs that have the fp8 mma of cu/product/product_sm80.cuh.
Datacenter GPUs between Ada and consumer Blackwell have other fp8 instructions."""
MULTIPLE = 16  # bytes: alignment of rows in Hopper's products
SCALE_BLOCK = 128  # elements that share the scale of an 8-bit moment
TILE_ROWS = 256  # rows of a tile, which a cluster of two thread blocks computes
NARROW, WIDE = 192, 224  # columns of a tile
# The store of a wide tile overlaps no multiplication. It takes as long as the multiplication of
# this many bytes per row of the left matrix.
STORED_ALONE = 448

# column_sum in cu/pointwise/reduce.cu: threads of a block; rows that one warp sums before several
# warps share columns.
COLUMN_SUM_THREADS, COLUMN_SUM_ROWS = 1024, 8


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One row in registers of `warps` warps: each lane holds `vectors` vectors of 16 bytes."""

    warps: int
    vectors: int

    @property
    def consts(self) -> dict[str, int]:
        """The layout as the kernels' compile-time constants."""
        return {"WARPS": self.warps, "VECTORS": self.vectors}

    def launch(self, rows: int, block_warps: int, max_blocks: int) -> tuple[int, int]:
        """(blocks, threads of a block) for a loop over rows. A block of at most `block_warps` warps
        takes several rows at once if they fit."""
        block_rows = max(1, block_warps // self.warps)
        return min(ceil_div(rows, block_rows), max_blocks), WARP * self.warps * block_rows


@cache
def row_layout(columns: int, itemsize: int, lane_vectors: int) -> RowLayout:
    """Layout of rows of `columns` elements: the smallest power of 2 of warps that hold a row.
    lane_vectors: number of vectors for which a lane has registers."""
    vectors = columns * itemsize // VECTOR_BYTES
    warps = 1
    while warps * WARP * lane_vectors < vectors:
        warps *= 2
    return RowLayout(warps, ceil_div(vectors, warps * WARP))


# These kernels are declared together, because one compilation of reduce.cu defines the types of
# both. COLUMN_SUM finishes the partial sums of all operations.
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


def finish_column_sum(dev: Device, target: Accumulator | None, partial: Tensor) -> None:
    """Set target (columns,) to the sum of partial's rows, or add the sum to target. partial: F32
    (rows, columns). target: None, without a launch, if the gradient is not wanted."""
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
    """Raise ValueError for a size that GPU kernels cannot load in vectors; references take any
    size."""
    if dev.spec.capability > 0 and size % multiple:
        raise ValueError(f"{op}: {name} must be a multiple of {multiple} on a GPU, got {size}")


def abs_max_consts(abs_max: Tensor | None) -> dict[str, int]:
    """Compile-time constant of kernels that have an optional result abs_max, F32 (1,)."""
    return {"ABS_MAX": int(abs_max is not None)}


class LogitRows(NamedTuple):
    """Logits (rows, padded_vocab) with outputs and inputs of their loss, (rows,) each. losses, lse:
    F32 outputs, lse is the log-sum-exp. targets: I32, negative in masked rows. weights: F32 factors
    of the rows' gradients; None: all are 1."""

    logits: Tensor
    losses: Tensor
    lse: Tensor
    targets: Tensor
    weights: Tensor | None
    vocab_size: int


ROWS_MULTIPLE = 4  # rows of matrices with transposed codes: a thread transposes four


def declared_fp8(rows: str, features: str) -> str:
    """Declaration of a kernel's last arguments, for an optional FP8 result [rows, features];
    fp8_args() makes their values."""
    return (
        f"out Q[{rows},{features}]? codes, out Q[{features},padded({rows})]? transposed, "
        "f32[1]? scale, inout i32[1]? saturated"
    )


def fp8_args(fp8: Fp8Out | None) -> tuple[Tensor | None, ...]:
    """Values of the arguments that declared_fp8() declares."""
    return (None,) * 4 if fp8 is None else tuple(fp8)


def fp8_consts(op: str, fp8: Fp8Out | None, rows: int, features: int) -> dict[str, int]:
    """Compile-time constants of a kernel with an optional FP8 result. TypeError if fp8 has neither
    codes nor transposed codes; ValueError for sizes without codes."""
    if fp8 is None:
        return {"CODES": 0, "TRANSPOSED": 0}
    if fp8.codes is None and fp8.transposed is None:
        raise TypeError(f"{op}: fp8.codes or fp8.transposed must be a tensor, both are None")
    if features % CODES_MULTIPLE or (fp8.transposed is not None and rows % ROWS_MULTIPLE):
        raise ValueError(
            f"{op}: FP8 results have features in multiples of {CODES_MULTIPLE}, and transposed "
            f"rows of {ROWS_MULTIPLE}, got ({rows}, {features})"
        )
    return {"CODES": int(fp8.codes is not None), "TRANSPOSED": int(fp8.transposed is not None)}


# Last arguments of kernels that read the FP8 result of a product; product_args() makes their
# values.
PRODUCT_ARGS = (
    "f32[1]? in_scale, f32[1]? in_largest, inout f32[1]? in_abs_max, inout i32[1]? in_saturated"
)


def product_args(product: ProductCodes | None) -> tuple[Tensor | None, ...]:
    """Values of the arguments that PRODUCT_ARGS declares."""
    if product is None:
        return (None,) * 4
    largest = product.largest if product.abs_max is not None else None
    return (product.scale, largest, product.abs_max, product.saturated)


# -- Backward kernels of activations, which may write forward's output again -----------------------

# Values of again_consts for forward kernels, which the same file contains.
NOT_AGAIN = {"OUT": 0, "OUT_TRANSPOSED": 0}


def declared_again(rows: str, features: str) -> str:
    """Declaration of the last arguments, for forward's output [rows, features]; again_args() makes
    their values."""
    return (
        f"out T[*{rows},{features}]? out, out O[{features},padded({rows})]? out_transposed, "
        "f32[1]? out_scale, inout i32[1]? out_saturated"
    )


def again_args(out: Tensor | None, out_fp8: Fp8Out | None) -> tuple[Tensor | None, ...]:
    """Values of the arguments that declared_again() declares."""
    return (out, *fp8_args(out_fp8)[1:])


def again_consts(op: str, out: Tensor | None, out_fp8: Fp8Out | None) -> dict[str, int]:
    """Compile-time constants for forward's output: a tensor or transposed codes. TypeError if both
    are given, or if out_fp8 has codes that are not transposed."""
    if out is not None and out_fp8 is not None:
        raise TypeError(f"{op}: out and out_fp8 are both given, only one of them can be written")
    if out_fp8 is not None and (out_fp8.codes is not None or out_fp8.transposed is None):
        raise TypeError(f"{op}: out_fp8 must have transposed alone, codes must be None")
    return {"OUT": int(out is not None), "OUT_TRANSPOSED": int(out_fp8 is not None)}


# -- Kernels of adapters of rows of a matrix ------------------------------------------------------

MAX_SPANS = 4
COLUMN_MULTIPLE = 8  # columns: a BF16 row then is a multiple of 16 bytes

Spans = Sequence[tuple[int, int]]
"""The rows [start, stop) of a matrix that each adapter changes; ascending, no span is empty."""


def padded_columns(count: int, rank: int) -> int:
    """Columns of the matrix that holds `count` adapters side by side."""
    return ceil_div(count * rank, COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def expect_spans(op: str, spans: Spans, rows: int) -> None:
    """Raise ValueError unless spans ascend within the rows of a matrix."""
    if not 1 <= len(spans) <= MAX_SPANS:
        raise ValueError(f"{op}: spans must be 1 to {MAX_SPANS}, got {len(spans)}")
    edges = [0, *chain(*spans), rows]
    if edges != sorted(edges) or any(start == stop for start, stop in spans):
        raise ValueError(f"{op}: spans must ascend within {rows} rows, none empty, got {spans}")


# -- Kernels that work in OctetTiles --------------------------------------------------------------

OCTET_TILE = (128, 64)  # rows and columns of a thread block's OctetTile, see cu/fp8.cuh


def octet_tiles(rows: int, columns: int) -> tuple[int, int]:
    """Grid (across, down) of a kernel that works in OctetTiles."""
    return ceil_div(columns, OCTET_TILE[1]), ceil_div(rows, OCTET_TILE[0])


def expect_scales(
    op: str, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None
) -> None:
    """Raise TypeError if both tensors are E5M2, if fp8 codes lack a scale, or if another tensor has
    one."""
    if a.dtype is b.dtype is E5M2:
        raise TypeError(f"{op}: a or b must be {E4M3.label}, both are {E5M2.label}")
    if not (a.dtype in FP8) is (scale_a is not None) is (scale_b is not None):
        raise TypeError(f"{op}: fp8 codes have scales, and only they")


def expect_scale(op: str, name: str, moment: Tensor, scale: Tensor | None) -> None:
    """Raise TypeError unless E4M3 moments, and only E4M3 moments, have scales."""
    if (moment.dtype is E4M3) != (scale is not None):
        given = "given" if scale is None else "None"
        raise TypeError(f"{op}: {name}_scale must be {given}, {name} is {moment.dtype.label}")


class Tiles(NamedTuple):
    """Division of a result (M, N) into tiles of TILE_ROWS rows and `columns` columns. clusters:
    number of clusters, of two thread blocks each, that run at once."""

    M: int
    N: int
    columns: int
    clusters: int

    @classmethod
    def of(cls, dev: Device, M: int, N: int, columns: int = NARROW) -> Tiles:
        """Tiles on all multiprocessors of a device."""
        return cls(M, N, columns, dev.spec.num_sms // 2)

    @property
    def count(self) -> int:
        """Number of tiles."""
        return ceil_div(self.M, TILE_ROWS) * ceil_div(self.N, self.columns)

    @property
    def computed(self) -> int:
        """Number of tiles that all clusters could compute in the waves that the result needs."""
        return ceil_div(self.count, self.clusters) * self.clusters

    @property
    def idle(self) -> float:
        """Elements outside the result that the waves have time for, as a fraction of M * N."""
        return self.computed * TILE_ROWS * self.columns / (self.M * self.N) - 1


def tile_columns(dev: Device, M: int, N: int, row_bytes: int) -> int:
    """Columns of a tile with which the kernel `adapted` is fastest. row_bytes: bytes of a row of
    the left matrix.

    A wave's time grows with columns and K. Storing a narrow tile overlaps the next multiplication;
    storing a wide tile does not."""

    def time(columns: int) -> int:  # in arbitrary units
        alone = STORED_ALONE if columns == WIDE else 0
        return Tiles.of(dev, M, N, columns).computed * columns * (row_bytes + alone)

    return min((NARROW, WIDE), key=time)


CHUNK = 64
"""Tokens of a chunk of linear attention over states."""


class Heads(NamedTuple):
    """Heads of linear attention over states. Hk: number of query and key heads. Hv: number of value
    heads and states. DK: channels of a query or key. DV: channels of a value."""

    Hk: int
    Hv: int
    DK: int
    DV: int

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values together."""
        return 2 * self.Hk * self.DK + self.Hv * self.DV


class ChunkedCall:
    """Sizes, scratch and costs of one call that computes sequences in chunks of CHUNK tokens.

    name: prefix of the scratch tensors' names. shapes: by name, the shape of a value head's tensor
    in one chunk; "factors" is F32, other tensors have the dtype of qkv.
    """

    name: str
    shapes: dict[str, tuple[int, int]]

    def __init__(
        self,
        op: str,
        dev: Device,
        qkv: Tensor,
        heads: Heads,
        starts: Tensor | None,
        state: Tensor | None,
    ):
        """qkv: (B, T, channels). ValueError if both state and starts are given."""
        if state is not None and starts is not None:
            raise ValueError(f"{op}: a state belongs to one document, starts must be None")
        self.dev, self.heads, (self.B, self.T, _) = dev, heads, qkv.shape
        self.dtype, self.carried = qkv.dtype, int(state is not None)
        self.chunks = ceil_div(self.T, CHUNK)
        self.sizes = (self.T, heads.Hk, heads.Hv)

    @contextmanager
    def scratch(self, *wanted: str) -> Iterator[list[Tensor]]:
        """Yield scratch tensors (B, Hv, chunks, ...), one for each wanted name in `shapes`."""
        with ExitStack() as temps:
            tensors = []
            for name in wanted:
                shape = (self.B, self.heads.Hv, self.chunks, *self.shapes[name])
                dtype = F32 if name == "factors" else self.dtype
                scratch = self.dev.scratch(f"{self.name} {name}", shape, dtype)
                tensors.append(temps.enter_context(scratch))
            yield tensors

    def cost(self, kernel: Kernel, fmas: int) -> Cost:
        """Cost of a launch. fmas: multiplications with addition per token and value head."""
        flops = 2 * fmas * self.B * self.T * self.heads.Hv
        sizes = (self.T, self.heads.DK, self.B * self.heads.Hv)
        return delta_cost(kernel, self.dtype, flops, sizes)

    def tiles(self, rows: int, *widths: int) -> int:
        """Bytes of shared memory for BF16 tiles, one of `rows` rows for each width; 0 for F32
        matrices, which are read from global memory."""
        return 2 * rows * sum(width + 8 for width in widths) if self.dtype is BF16 else 0
