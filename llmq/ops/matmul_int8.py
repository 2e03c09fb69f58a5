"""The product of signed bytes, exactly summed, with a scale for each row of both matrices."""

from typing import NamedTuple

from llmq.base.dtypes import BF16, F32, I8, I8_MAX
from llmq.base.tensor import Tensor
from llmq.ops.common import MULTIPLE, expect_added, expect_matrix, expect_operands
from llmq.runtime.cost import product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

MOST_TERMS = (2**31 - 1) // I8_MAX**2  # of a sum that cannot overflow
WARP_M, STEP = 64, 64  # rows of a warp, bytes of a step in cu/matmul_int8.cu

_REST = (
    "const i8* a, const i8* b, const f32* scale_a, const f32* scale_b, const bf16*? bias, "
    "i64 M, i64 N, i64 K"
)
MATMUL_INT8 = Kernel("matmul_int8.cu", "matmul_int8", args=f"D* out, {_REST}")
# The same entry; declared apart because it reads what it adds to.
MATMUL_INT8_ACCUMULATE = Kernel("matmul_int8.cu", "matmul_int8", args=f"inout D* out, {_REST}")


class Tiles(NamedTuple):
    """How a product is cut: a block has warps_m * warps_n warps, of 64 rows and warp_n columns."""

    warps_m: int
    warps_n: int
    warp_n: int
    stages: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return WARP_M * self.warps_m, self.warp_n * self.warps_n

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block."""
        return self.stages * sum(self.shape) * STEP

    @property
    def consts(self) -> dict[str, int]:
        """The tiles as the kernel's compile-time constants."""
        return {name.upper(): value for name, value in self._asdict().items()}

    def count(self, M: int, N: int) -> int:
        """Blocks of a product."""
        rows, columns = self.shape
        return ceil_div(M, rows) * ceil_div(N, columns)


# From the one that reads the least to the one that has the most blocks.
TILES = (Tiles(4, 2, 64, 3), Tiles(2, 4, 32, 4), Tiles(1, 4, 16, 4))


def tiles_of(M: int, N: int, num_sms: int) -> Tiles:
    """The largest tiles that give every multiprocessor a block, else the smallest ones."""
    for tiles in TILES:
        if tiles.count(M, N) >= num_sms:
            return tiles
    return TILES[-1]


def matmul_int8(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Row-major out = (scale_a * a) @ (scale_b * b)^T [+ bias | + out] of codes a and b.

    Args (contiguous; M, N and K multiples of 16, K at most MOST_TERMS):
        out      out  F32 or BF16  (M,N)   F32 with accumulate
        a        in   I8           (M,K)
        b        in   I8           (N,K)
        scale_a  in   F32          (M,)
        scale_b  in   F32          (N,)
        bias     in   BF16         (N,)    or None; added to every row; not with accumulate

    Cost:    2*M*N*K operations; one launch.
    """
    op = "matmul_int8"
    expect_matrix(op, "out", out, (F32, BF16))
    expect_operands(op, a, b, dtypes=(I8,))
    (M, N), K = out.shape, a.shape[1]
    if M % MULTIPLE or N % MULTIPLE or K % MULTIPLE:
        raise ValueError(f"{op}: M, N, K must be multiples of {MULTIPLE}, got {(M, N, K)}")
    if K > MOST_TERMS:
        raise ValueError(f"{op}: K must be at most {MOST_TERMS}, or sums overflow, got {K}")
    expect(op, "a", a, I8, (M, K))
    expect(op, "b", b, I8, (N, K))
    expect(op, "scale_a", scale_a, F32, (M,))
    expect(op, "scale_b", scale_b, F32, (N,))
    if accumulate and out.dtype != F32:
        raise TypeError(f"{op}: out must be F32 with accumulate, got {out.dtype.label}")
    expect_added(op, out, bias, accumulate=accumulate)
    tiles = tiles_of(M, N, dev.spec.num_sms)
    dev.launch(
        MATMUL_INT8_ACCUMULATE if accumulate else MATMUL_INT8,
        tiles.count(M, N),
        32 * tiles.warps_m * tiles.warps_n,
        (out, a, b, scale_a, scale_b, bias, M, N, K),
        consts={**tiles.consts, "BIAS": int(bias is not None), "ACCUMULATE": int(accumulate)},
        smem=tiles.shared_bytes,
        cost=product_cost((M, N, K), a.dtype, out.dtype, accumulate=accumulate),
    )
