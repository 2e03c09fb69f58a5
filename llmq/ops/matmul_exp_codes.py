"""The fp8 product of logits for Hopper, with codes of their exponentials behind it: one launch.

As `llmq.ops.matmul_exp`, but that operands and results are fp8 codes (`llmq.ops.exp_codes` says
what is left of cross-entropy).
"""

from __future__ import annotations

from llmq.base.dtypes import E4M3, E5M2, F32, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    CAPABILITY,
    PRODUCT_SHARED,
    PRODUCT_THREADS,
    PRODUCT_TILE,
    expect_fp8_multiples,
    num_sums,
    own_product_blocks,
    runs_own_products,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

OP = "matmul_exp_codes"
MIN_ROWS, MIN_COLUMNS = 2048, 8192  # as of matmul_exp

FORWARD = Kernel(
    "matmul_exp_codes.cu",
    "matmul_exp_codes",
    args="e5m2* e, f32* sums, f32* target_logits, const A[128]* a, const B[96]* b, "
    "const f32* scale_a, const f32* scale_b, const f32* shift, const i32* targets, "
    "i32 M, i32 N, i32 K, i32 vocab",
    capability=CAPABILITY,
)
# Reads and writes next to nothing, as a rule.
AGAIN = Kernel(
    "matmul_exp_codes.cu",
    "exp_codes_again",
    args="few e5m2* e, few const A[128]* a, few const B[96]* b, const f32* scale_a, "
    "const f32* scale_b, few const f32* shift, few const i32* targets, few const i32* rows, "
    "i32 M, i32 N, i32 K, i32 vocab",
    capability=CAPABILITY,
)


def serves(dev: Device, a: Tensor, N: int) -> bool:
    """Whether this is the way to compute the loss of logits (M, N) = a (M, K) @ b^T on a device.

    Fp8 products may be given to it only where they may sum with fewer bits. A plan for any GPU does
    not have it: the other way takes more scratch.
    """
    if a.dtype != E4M3:
        return False
    M, K = a.shape
    return M >= MIN_ROWS and N >= MIN_COLUMNS and runs_own_products(dev, CAPABILITY, (M, N, K), 0)


def forward(
    dev: Device,
    e: Tensor,
    sums: Tensor,
    target_logits: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    shift: Tensor,
    targets: Tensor,
    vocab_size: int,
) -> None:
    """e = exp(BF16(scale_a * scale_b * (a @ b^T)) - shift), the sums of its rows, and some logits.

    Args (contiguous; M, N and K multiples of 16):
        e              out  E5M2 (M, N)   rounded to nearest even and clamped; columns >= vocab_size
                                          and each row's target are 0
        sums           out  F32  (num_sums(N), M)   by tiles of columns, of e before it is rounded
        target_logits  out  F32  (M,)     nothing is written of masked rows
        a              in   E4M3 (M, K)
        b              in   E4M3 (N, K)
        scale_a        in   F32  (1,)
        scale_b        in   F32  (1,)
        shift          in   F32  (M,)     sums are infinite where a logit is more than 88 above it
        targets        in   I32  (M,)     ids in [0, vocab_size); negative: masked

    Products are added with fewer bits, as `matmul_fp8` says of fast_accumulation: the logits have
    the bits of its result.

    Cost:    2*M*N*K FLOPs; one launch. Needs compute capability 9.0.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape. Targets are not checked.
    """
    M, N = _check(OP, e, a, b, scale_a, scale_b, shift, targets, vocab_size)
    expect(OP, "sums", sums, F32, (num_sums(N), M))
    expect(OP, "target_logits", target_logits, F32, (M,))
    operands = (a, b, scale_a, scale_b, shift, targets)
    results, flops = (e, sums, target_logits), 2 * a.size * N
    _launch(dev, FORWARD, (*results, *operands), (M, N, a.shape[1], vocab_size), flops)


def again(
    dev: Device,
    e: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    shift: Tensor,
    targets: Tensor,
    rows: Tensor,
    vocab_size: int,
) -> None:
    """The rows of e that are listed, once more: next to nothing where none are.

    rows: I32 (1 + M,), how many there are, and which. Row i of a is that of row rows[1 + i] of e,
    shift and targets. All else as in `forward`.
    """
    op = f"{OP}.again"
    M, N = _check(op, e, a, b, scale_a, scale_b, shift, targets, vocab_size)
    expect(op, "rows", rows, I32, (1 + M,))
    tensors = (e, a, b, scale_a, scale_b, shift, targets, rows)
    _launch(dev, AGAIN, tensors, (M, N, a.shape[1], vocab_size))


def _check(
    op: str,
    e: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    shift: Tensor,
    targets: Tensor,
    vocab_size: int,
) -> tuple[int, int]:
    (M, K), N = a.shape, b.shape[0]
    expect_fp8_multiples(op, M, N)
    expect_fp8_multiples(op, M, K)
    expect(op, "e", e, E5M2, (M, N))
    expect(op, "a", a, E4M3, (M, K))
    expect(op, "b", b, E4M3, (N, K))
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        expect(op, name, scale, F32, (1,))
    expect(op, "shift", shift, F32, (M,))
    expect(op, "targets", targets, I32, (M,))
    if not 0 < vocab_size <= N:
        raise ValueError(f"{op}: vocab_size must be in [1, {N}], got {vocab_size}")
    return M, N


def _launch(
    dev: Device, kernel: Kernel, tensors: tuple, sizes: tuple[int, int, int, int], flops: int = 0
) -> None:
    blocks = own_product_blocks(dev, *sizes[:2], PRODUCT_TILE)
    args = (*tensors, *sizes)
    dev.launch(kernel, blocks, PRODUCT_THREADS, args, smem=PRODUCT_SHARED, flops=flops)
