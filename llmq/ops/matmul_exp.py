"""The product of logits for Hopper, with their exponentials behind it: one launch.

The results that the product has in registers are rounded as logits are kept, and their exponentials
are stored in place of them, so that cross-entropy neither reads nor writes a matrix as large as the
logits (`llmq.ops.exp_rows` says what is left of it).
"""

from __future__ import annotations

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    CAPABILITY,
    PRODUCT_SHARED,
    PRODUCT_THREADS,
    PRODUCT_TILE,
    expect_operands,
    num_sums,
    own_product_blocks,
)
from llmq.runtime.cost import product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

OP = "matmul_exp.forward"

FORWARD = Kernel(
    "matmul_exp.cu",
    "matmul_exp",
    args="bf16[32]* e, f32* sums, f32* target_logits, const bf16[128]* a, const bf16[96]* b, "
    "const f32* shift, const i32* targets, i32 M, i32 N, i32 K, i32 vocab",
    capability=CAPABILITY,
)


def forward(
    dev: Device,
    e: Tensor,
    sums: Tensor,
    target_logits: Tensor,
    a: Tensor,
    b: Tensor,
    shift: Tensor,
    targets: Tensor,
    vocab_size: int,
) -> None:
    """e = exp(X(a @ b^T) - shift), the sums of its rows by tiles of columns, and some logits.

    Args (contiguous; N and K multiples of 8; X is BF16):
        e              out  X    (M, N)   columns >= vocab_size are 0
        sums           out  F32  (num_sums(N), M)   of e before it is rounded
        target_logits  out  F32  (M,)     the target's logit; nothing is written of masked rows
        a              in   X    (M, K)
        b              in   X    (N, K)
        shift          in   F32  (M,)     e is infinite where a logit is more than 88 above it
        targets        in   I32  (M,)     ids in [0, vocab_size); negative: masked

    Cost:    2*M*N*K FLOPs; one launch. Needs compute capability 9.0.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape. Targets are not checked.
    """
    expect_operands(OP, a, b, dtypes=(BF16,))
    (M, K), N = a.shape, b.shape[0]
    expect(OP, "b", b, None, (N, K))
    if not 0 < vocab_size <= N:
        raise ValueError(f"{OP}: vocab_size must be in [1, {N}], got {vocab_size}")
    expect(OP, "e", e, BF16, (M, N))
    expect(OP, "sums", sums, F32, (num_sums(N), M))
    expect(OP, "shift", shift, F32, (M,))
    expect(OP, "targets", targets, I32, (M,))
    expect(OP, "target_logits", target_logits, F32, (M,))
    dev.launch(
        FORWARD,
        own_product_blocks(dev, M, N, PRODUCT_TILE),
        PRODUCT_THREADS,
        (e, sums, target_logits, a, b, shift, targets, M, N, K, vocab_size),
        smem=PRODUCT_SHARED,
        cost=product_cost((M, N, K), BF16, BF16, trans_b=True, epilogue="exp"),
    )
