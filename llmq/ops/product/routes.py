"""Rules by which a fused kernel replaces a library product and its epilogue.

A rule depends on device, formats and sizes, not on measurements, so that plans and runs have the
same launches. LLMQ_FUSED overrides the rules' conditions about speed (`Device.fused`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from llmq.base.dtypes import BF16, E4M3, E5M2, DType
from llmq.ops.common import CAPABILITY, MULTIPLE, TILE_ROWS, Tiles, tile_columns
from llmq.ops.product import matmul_fused
from llmq.ops.product.matmul_fused import MAX_RANK
from llmq.runtime.device import HOST_SPEC, Device


class Sizes(NamedTuple):
    """Sizes and dtypes of a product (M, N) with sums over K. N: F if a gated activation follows. a,
    out: dtypes of operand a and of the result. rank: columns of the adapters; 0: no adapters."""

    M: int
    N: int
    K: int
    a: DType
    out: DType | None
    rank: int = 0

    @property
    def row(self) -> int:
        """Bytes of a row of a."""
        return self.a.itemsize * self.K


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A fused kernel, and the rule for its use.

    kernel: name of the kernel, one of FUSED. a: dtypes of operand a. out: dtype of the result;
    None: any. aligned: returns numbers that must be multiples of 16, mostly bytes of rows. columns:
    returns a divisor of N. rows, least: M and N from which the kernel is faster than two kernels.
    faster: a further condition for being faster. fast: True if sums of fp8 codes have fewer bits,
    which needs permission. bias: True if the kernel takes a bias. exact: True if results have the
    bits of two kernels (tests/model/test_product.py).
    """

    kernel: str
    a: tuple[DType, ...]
    out: DType | None = None
    aligned: Callable[[Sizes], Iterable[int]]
    columns: Callable[[], int] = lambda: 1
    rows: int = 0
    least: int = 0
    faster: Callable[[Device, Sizes], bool] = lambda dev, sizes: True
    fast: bool = False
    bias: bool = False
    exact: bool = True


def _fills_turns(dev: Device, sizes: Sizes) -> bool:
    """True if idle clusters in the last wave cost less time than the saved traffic.

    Idle clusters cost time in proportion to K. The saving, one read and write of the result, does
    not depend on K. So the idle share times the bytes of a row of operand a has a bound
    (h100_gemm_tail.md; for whole steps docs/decisions/kernels.md)."""
    if sizes.N >= MANY_COLUMNS:
        return True
    M, N, row = sizes.M, sizes.N, sizes.row
    return Tiles.of(dev, M, N, tile_columns(dev, M, N, row)).idle * row <= MOST_IDLE


def _uses_turns(dev: Device, sizes: Sizes) -> bool:
    """True if K is large enough to hide the addition, and tiles fill the waves. Else the library is
    faster, because it splits K and has other tile sizes."""
    M, N = sizes.M, sizes.N
    tiles = Tiles.of(dev, M, N)
    used = tiles.count / tiles.computed
    filled = M * N / (tiles.count * TILE_ROWS * tiles.columns)
    return sizes.K >= MIN_DEPTH and used >= LEAST_USED and filled >= LEAST_FILLED


MANY_COLUMNS, MOST_IDLE = 8192, 2400
MIN_DEPTH = 4096
# Least share of the waves' clusters that have a tile, and of the tiles' elements in the result.
LEAST_USED, LEAST_FILLED = 0.87, 0.93

# By kind of epilogue; "adapters": adapters, bias and addend, without an epilogue.
ROUTES = {
    "adapters": Route(
        kernel="matmul_adapted",
        a=(BF16, E4M3, E5M2),
        out=BF16,
        aligned=lambda s: (2 * s.N, s.row, 2 * s.rank),
        rows=2048,
        faster=_fills_turns,
        fast=True,
        bias=True,
        exact=False,  # the sum with adapters is rounded once, not twice
    ),
    # Measured with at least 4,096 rows and at least these columns, in fp8 and bf16; no table is
    # kept. Fewer rows would leave multiprocessors idle in the last wave.
    "glu": Route(
        kernel="matmul_swiglu",
        a=(BF16, E4M3),
        aligned=lambda s: (s.M, s.N, s.row, 2 * s.rank),
        rows=2048,
        least=4864,
        fast=True,
    ),
    "glu_grad": Route(  # smaller products were not measured
        kernel="matmul_swiglu_backward",
        a=(BF16, E4M3, E5M2),
        aligned=lambda s: (s.M, s.row, 2 * s.rank),
        columns=lambda: matmul_fused.GRADIENT_COLUMNS,
        rows=2048,
        least=4864,
        fast=True,
    ),
    "gradient": Route(
        kernel="matmul_gradient",
        a=(E4M3, E5M2),
        out=BF16,
        aligned=lambda s: (2 * s.N, s.K),
        faster=_uses_turns,
    ),
    # Compared with the kernel for all cards since Ampere in h200_grouped.md.
    "grouped": Route(
        kernel="matmul_grouped",
        a=(BF16, E4M3, E5M2),
        out=BF16,
        aligned=lambda s: (2 * s.N, 2 * s.K, s.K // 4, 2 * s.rank),  # K: a multiple of 64
        least=64,  # products of adapters have fewer columns
        fast=True,
        bias=True,
    ),
    "grouped_grad": Route(
        kernel="matmul_grouped_gradient", a=(BF16,), out=BF16, aligned=lambda s: (2 * s.M, 2 * s.N)
    ),
}


def taken(dev: Device, kind: str, sizes: Sizes, *, fast: bool = False) -> Route | None:
    """The route for an epilogue on a device and a product of these sizes; None: two kernels.

    fast: True if sums of fp8 codes may have fewer bits. LLMQ_FUSED overrides conditions about
    speed, and permits the CPU. Several ranks have the same routes, and so the same bits, as one
    rank. This is safe beside collectives: no thread block waits for another block, and a block
    whose multiprocessor runs a collective only starts later (docs/decisions/collectives.md)."""
    route = ROUTES.get(kind)
    if route is None or sizes.a not in route.a or route.out not in (None, sizes.out):
        return None
    if route.fast and sizes.a != BF16 and not fast:
        return None
    there = dev.spec.capability == CAPABILITY
    told = dev.fused
    if told is not None:
        on_cpu = dev.spec.capability == HOST_SPEC.capability
        there = route.kernel in told and (there or on_cpu)
    if not there or sizes.rank > MAX_RANK or sizes.N % route.columns():
        return None
    large = route.rows <= sizes.M and route.least <= sizes.N
    if told is None and not (large and route.faster(dev, sizes)):
        return None
    return route if all(size % MULTIPLE == 0 for size in route.aligned(sizes)) else None
