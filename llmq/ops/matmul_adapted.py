"""A matrix product for Hopper, with the product of the adapters beside the matrix in it.

By itself that product is short and wide: it reads the result of the first one and writes it again,
which takes longer than its arithmetic.
"""

from __future__ import annotations

from llmq.base.dtypes import BF16, E4M3, E5M2
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    CAPABILITY,
    expect_adapters,
    expect_added,
    expect_matrix,
    expect_operands,
    own_product_blocks,
    own_product_computed,
    rank_consts,
)
from llmq.runtime.cost import product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

THREADS = 384
TILE_ROWS = 256  # of a tile of a cluster of two blocks
# Bytes of shared memory by columns of a tile: stages, chunks of out, barriers, alignment.
SHARED = {
    192: 5 * 40960 + 8 * 2048 + 20 * 8 + 1024,
    224: 4 * 49152 + 16 * 2048 + 18 * 8 + 1024,
}
NARROW, WIDE = SHARED
STORED_ALONE = 448  # bytes of a row of a, which would be multiplied while a wide tile is stored


def _kernel(b_rows: int, tail_rows: int) -> Kernel:
    """b_rows, tail_rows: of the half of a tile of b or tail."""
    return Kernel(
        "matmul_adapted.cu",
        "matmul_adapted",
        args=f"bf16[16]* out, const A[128]* a, const B[{b_rows}]* b, const bf16[128]*? h, "
        f"const bf16[{tail_rows}]*? tail, const f32*? scale_a, const f32*? scale_b, "
        "const bf16*? bias, const bf16[16]*? addend, i32 M, i32 N, i32 K",
        capability=CAPABILITY,
    )


# Rows of the half of a tile where K is the inner dimension, and of 64 columns where it is not.
INSIDE, INSIDE_WIDE, OUTSIDE = NARROW // 2, WIDE // 2, 32
MATMUL_ADAPTED = _kernel(INSIDE, INSIDE)
MATMUL_ADAPTED_WIDE = _kernel(INSIDE_WIDE, INSIDE_WIDE)
MATMUL_ADAPTED_TAIL_TRANSPOSED = _kernel(INSIDE, OUTSIDE)
MATMUL_ADAPTED_TAIL_TRANSPOSED_WIDE = _kernel(INSIDE_WIDE, OUTSIDE)
MATMUL_ADAPTED_TRANSPOSED = _kernel(OUTSIDE, OUTSIDE)


def _kernel_of(columns: int, b_outside: bool, tail_outside: bool) -> Kernel:
    """Where b's K is the outer dimension, tail's is, too."""
    if b_outside:
        return MATMUL_ADAPTED_TRANSPOSED
    if tail_outside:
        tails = (MATMUL_ADAPTED_TAIL_TRANSPOSED, MATMUL_ADAPTED_TAIL_TRANSPOSED_WIDE)
        return tails[columns == WIDE]
    return (MATMUL_ADAPTED, MATMUL_ADAPTED_WIDE)[columns == WIDE]


def tile_columns(dev: Device, M: int, N: int, row_bytes: int) -> int:
    """The columns of the tiles with which a product takes the least time. row_bytes: of a row of a.

    Turns of all clusters take as long as tiles are wide and K is long. While narrow tiles are
    stored, others are multiplied; while wide ones are, nothing is.
    """

    def seconds(columns: int) -> int:  # in no unit
        alone = STORED_ALONE if columns == WIDE else 0
        computed = own_product_computed(dev, M, N, (TILE_ROWS, columns))
        return computed * columns * (row_bytes + alone)

    return min(SHARED, key=seconds)


def matmul_adapted(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    h: Tensor | None,
    tail: Tensor | None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    transposed: bool = False,
) -> None:
    """Row-major out = scale_a * scale_b * (a @ b^T) + h @ tail^T + bias + addend, rounded once.

    Sums are F32. Fp8 codes are added as with fast accumulation (`ops.matmul.matmul_fp8`).

    Args (contiguous; rows multiples of 16 bytes):
        out         out  BF16                 (M,N)
        a           in   BF16, E4M3 or E5M2   (M,K)
        b           in   as a, not E5M2 twice (N,K)   BF16 and transposed: (K,N)
        h           in   BF16                 (M,R)   R at most MAX_RANK; or None
        tail        in   BF16                 (N,R)   transposed: (R,N); or None
        scale_a     in   F32                  (1,)    of fp8 codes, else None
        scale_b     in   F32                  (1,)
        bias        in   BF16                 (N,)    or None
        addend      in   BF16                 (M,N)   or None; other memory than out
        transposed                                    out = a @ b + h @ tail, but for fp8 codes b

    Cost:    2*M*N*(K+R) FLOPs; one launch. Needs compute capability 9.0.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "matmul_adapted"
    expect_matrix(op, "out", out, (BF16,))
    expect_operands(op, a, b, scale_a, scale_b, dtypes=(BF16, E4M3, E5M2))
    (M, N), K, fp8 = out.shape, a.shape[1], a.dtype != BF16
    expect(op, "a", a, None, (M, K))
    expect(op, "b", b, None, (K, N) if transposed and not fp8 else (N, K))
    expect_added(op, out, bias, addend)
    R = expect_adapters(op, h, tail, M, N, transposed=transposed)
    columns = tile_columns(dev, M, N, a.dtype.itemsize * K)
    how = {"trans_b": b.shape == (N, K), "addend": addend is not None}  # a square b counts, too
    dev.launch(
        _kernel_of(columns, transposed and not fp8, transposed),
        own_product_blocks(dev, M, N, (TILE_ROWS, columns)),
        THREADS,
        (out, a, b, h, tail, scale_a, scale_b, bias, addend, M, N, K),
        consts={
            "TRANSPOSED": int(transposed),
            "BIAS": int(bias is not None),
            "ADDEND": int(addend is not None),
            "TILE_WIDTH": columns,
        }
        | rank_consts(R),
        smem=SHARED[columns],
        cost=product_cost((M, N, K), a.dtype, BF16, fast=True, epilogue="adapted", rank=R, **how),
    )
