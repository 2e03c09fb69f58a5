"""A weight's gradient for Hopper: the product of fp8 codes that it is, added to what is stored.

A product of the library is written, and read again by the sum that rounds stochastically
(`llmq.ops.reduce`). This one is added to a stored BF16 gradient while the next tile is multiplied.
"""

from __future__ import annotations

from llmq.base.dtypes import BF16, E4M3, E5M2, I32, STEP_SCALARS_WORDS
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    CAPABILITY,
    MULTIPLE,
    PRODUCT_SHARED,
    PRODUCT_THREADS,
    PRODUCT_TILE,
    expect_matrix,
    expect_operands,
    own_product_blocks,
)
from llmq.runtime.cost import product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

OP = "matmul_gradient.add"
# If sums may not be fast, the tensor cores' sum, of 14 significant bits, is added to one in F32
# after so many steps of 128.
PART_STEPS = 4


def _kernel(d: str) -> Kernel:
    return Kernel(
        "matmul_gradient.cu",
        "matmul_gradient",
        args=f"{d} d, const A[128]* a, const B[96]* b, const f32* scale_a, const f32* scale_b, "
        "const i32* scalars, i32 accumulate, u32 salt, i32 M, i32 N, i32 K, i32 part_steps",
        capability=CAPABILITY,
    )


# Declared apart, because one reads what it adds to.
GRADIENT, GRADIENT_ACCUMULATE = _kernel("bf16*"), _kernel("inout bf16*")


def add(
    dev: Device,
    acc: Accumulator,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    fast_accumulation: bool = False,
) -> None:
    """acc.tensor += BF16(scale_a * scale_b * (a @ b^T)), or = where acc.accumulate is false.

    The bits are those of the product alone, and of `reduce.add` behind it.

    Args (contiguous; rows of multiples of 16 bytes):
        acc.tensor   inout  BF16   (M,N)   sums are rounded stochastically
        a            in     E4M3 or E5M2 (M,K)
        b            in     E4M3   (N,K)
        scale_a      in     F32    (1,)
        scale_b      in     F32    (1,)
        fast_accumulation                  as in matmul_fp8; here it is taken

    Cost:    2*M*N*K FLOPs; acc.tensor written once, and read once if it is added to; one launch.
             Needs compute capability 9.0.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    M, N, K = _sizes(acc, a, b, scale_a, scale_b)
    part_steps = 0 if fast_accumulation else PART_STEPS
    adding = (acc.scalars, int(acc.accumulate), acc.salt)
    dev.launch(
        GRADIENT_ACCUMULATE if acc.accumulate else GRADIENT,
        own_product_blocks(dev, M, N, PRODUCT_TILE),
        PRODUCT_THREADS,
        (acc.tensor, a, b, scale_a, scale_b, *adding, M, N, K, part_steps),
        consts={"EXACT": int(part_steps > 0)},
        smem=PRODUCT_SHARED,
        cost=product_cost(
            (M, N, K),
            a.dtype,
            BF16,
            accumulate=acc.accumulate,
            fast=fast_accumulation,
            epilogue="gradient",
        ),
    )


def _sizes(acc: Accumulator, a: Tensor, b: Tensor, *scales: Tensor) -> tuple[int, int, int]:
    """(M, N, K). TypeError or ValueError if operands do not fit."""
    expect_matrix(OP, "acc.tensor", acc.tensor, (BF16,))
    expect_operands(OP, a, b, *scales, dtypes=(E4M3, E5M2), codes=(E4M3,))
    expect(OP, "acc.scalars", acc.scalars, I32, (STEP_SCALARS_WORDS,))
    (M, N), K = acc.tensor.shape, a.shape[1]
    expect(OP, "a", a, None, (M, K))
    expect(OP, "b", b, None, (N, K))
    if 2 * N % MULTIPLE or K % MULTIPLE:
        raise ValueError(f"{OP}: rows must have multiples of {MULTIPLE} bytes, got {(M, N, K)}")
    return M, N, K
