"""The up product of a gated MLP for Hopper, with the activation behind it: one launch.

What the product leaves in registers is rounded as it would be kept, and the activation is computed
of that, while the next tile is multiplied: no kernel reads it again. The adapters beside the matrix
are in the product as in `llmq.ops.matmul_adapted`.
"""

from __future__ import annotations

from llmq.base.dtypes import BF16, E4M3, F32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    CAPABILITY,
    FP8_ARGS,
    MULTIPLE,
    abs_max_consts,
    expect_adapters,
    fp8_args,
    fp8_consts,
    own_product_blocks,
    rank_consts,
    runs_own_products,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

OP = "matmul_swiglu.forward"
THREADS = 512
TILE = (256, 96)  # of out, of a cluster of two blocks
STAGES = 4
# Pairs of tiles, one tile of up and gate, barriers, alignment.
SHARED = STAGES * 40960 + 3 * 16384 + 8 * (2 * STAGES + 6) + 1024

# Tried with 4,096 rows and more, and these columns and more, in fp8 and bf16; no table is kept, and
# tools/gemm_gate.py --swiglu makes one. Fewer rows would leave cores idle in the last turn.
MIN_ROWS, MIN_COLUMNS = 2048, 4864

FORWARD = Kernel(
    "matmul_swiglu.cu",
    "matmul_swiglu",
    args="bf16*? up_gate, bf16*? out, const A[128]* a, const A[96]* b, const bf16[128]*? h, "
    "const bf16[96]*? tail, const f32*? scale_a, const f32*? scale_b, i32 M, i32 F, i32 K, "
    "inout f32*? abs_max, " + FP8_ARGS,
    capability=CAPABILITY,
)


def serves(dev: Device, a: Tensor, F: int, rank: int = 0) -> bool:
    """Whether this is the way to compute the activation (M, F) of a (M, K) on a device.

    rank: of the adapters, as h has it; 0: none. Fp8 codes may be given to it only where their
    products may sum with fewer bits.
    """
    if a.dtype not in (BF16, E4M3):
        return False
    M, K = a.shape
    sizes = (M, F, a.dtype.itemsize * K, 2 * rank)
    return M >= MIN_ROWS and F >= MIN_COLUMNS and runs_own_products(dev, CAPABILITY, sizes, rank)


def forward(
    dev: Device,
    up_gate: Tensor | None,
    out: Tensor | None,
    a: Tensor,
    b: Tensor,
    h: Tensor | None = None,
    tail: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    gelu: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """up_gate = scale_a * scale_b * (a @ b^T) + h @ tail^T, and out = up * silu(gate) of it.

    The bits are those of `matmul_adapted` (fp8: with fast accumulation), which rounds up_gate, and
    of `swiglu.forward`, which reads that. With gelu it is GeGLU.

    Args (contiguous; M and F multiples of 16, rows of multiples of 16 bytes):
        up_gate     out    BF16            (M,2F)  [up | gate] along the last dimension; or None
        out         out    BF16            (M,F)   may be None with fp8
        a           in     BF16 or E4M3    (M,K)
        b           in     as a            (2F,K)  the rows of up, and then those of gate
        h           in     BF16            (M,R)   R at most MAX_RANK; or None
        tail        in     BF16            (2F,R)  or None, with h
        scale_a     in     F32             (1,)    of fp8 codes, else None
        scale_b     in     F32             (1,)
        abs_max     inout  F32             (1,)    or None; raised to the largest |out|
        fp8         out                    (M,F)   or None; out in FP8

    Cost:    4*M*F*(K+R) FLOPs; one launch. Needs compute capability 9.0.
    Raises:  TypeError for a wrong dtype or no result, ValueError for a wrong shape.
    """
    (M, K), F = a.shape, b.shape[0] // 2
    R = _check(up_gate, out, a, b, h, tail, scale_a, scale_b, fp8)
    consts = abs_max_consts(OP, abs_max) | fp8_consts(OP, fp8, M, F)
    consts |= {"UP_GATE": int(up_gate is not None), "OUT": int(out is not None)}
    consts |= {"GELU": int(gelu)} | rank_consts(R)
    operands, sizes = (a, b, h, tail, scale_a, scale_b), (M, F, K)
    dev.launch(
        FORWARD,
        own_product_blocks(dev, M, F, TILE),
        THREADS,
        (up_gate, out, *operands, *sizes, abs_max, *fp8_args(fp8)),
        consts=consts,
        smem=SHARED,
        flops=4 * M * F * (K + R),
    )


def _check(
    up_gate: Tensor | None,
    out: Tensor | None,
    a: Tensor,
    b: Tensor,
    h: Tensor | None,
    tail: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    fp8: Fp8Out | None,
) -> int:
    """Shapes and dtypes, as forward's; returns R, 0 without h and tail."""
    if out is None and fp8 is None:
        raise TypeError(f"{OP}: out or fp8 must be given, both are None")
    if b.shape[0] % 2:
        raise ValueError(f"{OP}: b must have rows of up and of gate, got {b.shape}")
    (M, K), N = a.shape, b.shape[0]
    if M % MULTIPLE or N % (2 * MULTIPLE):
        raise ValueError(f"{OP}: M and F must be multiples of {MULTIPLE}, got {M} and {N // 2}")
    for name, tensor, width in (("up_gate", up_gate, N), ("out", out, N // 2)):
        if tensor is not None:
            expect(OP, name, tensor, BF16, (M, width))
    if a.dtype == E4M3:
        expect(OP, "scale_a", scale_a, F32, (1,))
        expect(OP, "scale_b", scale_b, F32, (1,))
    elif a.dtype != BF16:
        raise TypeError(f"{OP}: a must be {E4M3.label} or BF16, got {a.dtype.label}")
    elif scale_a is not None or scale_b is not None:
        raise TypeError(f"{OP}: only fp8 codes have scales")
    expect(OP, "b", b, a.dtype, (N, K))
    return expect_adapters(OP, h, tail, M, N, transposed=False)
