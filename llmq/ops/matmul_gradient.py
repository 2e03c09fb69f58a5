"""A weight's gradient for Hopper: the product that it is, added to what is stored, in one launch.

A product of the library is written, and read again by the sum that rounds stochastically
(`llmq.ops.reduce`). This one is added to a stored BF16 gradient while the next tile is multiplied.
"""

from __future__ import annotations

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32, STEP_SCALARS_WORDS, DType
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    CAPABILITY,
    MULTIPLE,
    PRODUCT_SHARED,
    PRODUCT_THREADS,
    own_product_blocks,
    runs_own_products,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

OP = "matmul_gradient.add"
TILE = (256, 192)  # of a cluster of two blocks
# Of fp8 products that may not sum fast: after so many steps of 128 the tensor cores' sum, of 14
# significant bits, is added to one in F32.
PART_STEPS = 4

MIN_DEPTH = 4096  # of what the sums are over: a shorter product hides less of the addition
# Of the turns of all clusters that are work, and of the tiles' elements that are there. The library
# divides sums among multiprocessors where turns would be wasted, and has tiles of other sizes.
LEAST_USED, LEAST_FILLED = 0.8, 0.95


def _kernels(a_rows: int, b_rows: int) -> tuple[Kernel, Kernel]:
    """Declared apart, because one reads what it adds to. a_rows, b_rows: of boxes."""

    def kernel(d: str) -> Kernel:
        return Kernel(
            "matmul_gradient.cu",
            "matmul_gradient",
            args=f"{d} d, const A[{a_rows}]* a, const B[{b_rows}]* b, const f32*? scale_a, "
            "const f32*? scale_b, const i32* scalars, i32 accumulate, u32 salt, "
            "i32 M, i32 N, i32 K, i32 part_steps",
            capability=CAPABILITY,
        )

    return kernel("bf16*"), kernel("inout bf16*")


GRADIENT, GRADIENT_ACCUMULATE = _kernels(128, 96)  # of fp8 codes
GRADIENT_BF16, GRADIENT_BF16_ACCUMULATE = _kernels(64, 32)


def serves(dev: Device, target: Tensor, dtype: DType, K: int) -> bool:
    """Whether this is the way to add to a gradient (M, N) on a device.

    dtype: of the operands, fp8 or BF16. K: rows that they are summed over.
    """
    if target.dtype != BF16 or dtype not in (BF16, E4M3) or K < MIN_DEPTH:
        return False
    (M, N), fp8 = target.shape, dtype == E4M3
    sizes = (2 * N, K) if fp8 else (2 * N, 2 * M)
    if not runs_own_products(dev, CAPABILITY, sizes, 0):
        return False
    used, filled = _share_of_turns(dev, M, N), _share_of_tiles(M, N)
    return used >= LEAST_USED and filled >= LEAST_FILLED


def _share_of_turns(dev: Device, M: int, N: int) -> float:
    tiles, clusters = _tiles(M, N), dev.spec.num_sms // 2
    return tiles / (ceil_div(tiles, clusters) * clusters)


def _share_of_tiles(M: int, N: int) -> float:
    return M * N / (_tiles(M, N) * TILE[0] * TILE[1])


def _tiles(M: int, N: int) -> int:
    return ceil_div(M, TILE[0]) * ceil_div(N, TILE[1])


def add(
    dev: Device,
    acc: Accumulator,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    fast_accumulation: bool = False,
) -> None:
    """acc.tensor += X(scale_a * scale_b * (a @ b^T)), or = where acc.accumulate is false.

    X is BF16. Of operands X the product is a^T @ b. The bits are those of the product alone, and
    of `reduce.add` behind it.

    Args (contiguous; rows of multiples of 16 bytes):
        acc.tensor   inout  X      (M,N)   sums are rounded stochastically
        a            in     E4M3 or E5M2 (M,K), or X (K,M)
        b            in     E4M3   (N,K), or X (K,N)
        scale_a      in     F32    (1,)    of fp8 codes; else None
        scale_b      in     F32    (1,)
        fast_accumulation                  as in matmul_fp8; here it is taken

    Cost:    2*M*N*K FLOPs; acc.tensor written once, and read once if it is added to; one launch.
             Needs compute capability 9.0.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    M, N, K = _sizes(acc, a, b)
    fp8 = a.dtype != BF16
    if fp8:
        expect(OP, "scale_a", scale_a, F32, (1,))
        expect(OP, "scale_b", scale_b, F32, (1,))
    elif scale_a is not None or scale_b is not None:
        raise TypeError(f"{OP}: only fp8 codes have scales")
    kernels = (GRADIENT, GRADIENT_ACCUMULATE)
    if not fp8:
        kernels = (GRADIENT_BF16, GRADIENT_BF16_ACCUMULATE)
    part_steps = PART_STEPS if fp8 and not fast_accumulation else 0
    adding = (acc.scalars, int(acc.accumulate), acc.salt)
    dev.launch(
        kernels[acc.accumulate],
        own_product_blocks(dev, M, N, TILE),
        PRODUCT_THREADS,
        (acc.tensor, a, b, scale_a, scale_b, *adding, M, N, K, part_steps),
        consts={"EXACT": int(part_steps > 0)},
        smem=PRODUCT_SHARED,
        flops=2 * M * N * K,
    )


def _sizes(acc: Accumulator, a: Tensor, b: Tensor) -> tuple[int, int, int]:
    """(M, N, K). TypeError or ValueError if operands do not fit."""
    if len(acc.tensor.shape) != 2 or len(a.shape) != 2:
        raise ValueError(f"{OP}: acc.tensor and a must have 2 dimensions")
    if a.dtype not in (BF16, E4M3, E5M2):
        raise TypeError(f"{OP}: a must be BF16 or fp8 codes, got {a.dtype.label}")
    M, N = acc.tensor.shape
    expect(OP, "acc.tensor", acc.tensor, BF16, (M, N))
    expect(OP, "acc.scalars", acc.scalars, I32, (STEP_SCALARS_WORDS,))
    fp8 = a.dtype != BF16
    K = a.shape[1 if fp8 else 0]
    expect(OP, "a", a, None, (M, K) if fp8 else (K, M))
    expect(OP, "b", b, E4M3 if fp8 else BF16, (N, K) if fp8 else (K, N))
    if any(size % MULTIPLE for size in (2 * N, K if fp8 else 2 * M)):
        raise ValueError(f"{OP}: rows must have multiples of {MULTIPLE} bytes, got {(M, N, K)}")
    return M, N, K
