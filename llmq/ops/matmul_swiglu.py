"""The up product of a gated MLP for Hopper, with the activation behind it: one launch.

The results that the product has in registers are rounded as they would be kept, and the activation
is computed of that, while the next tile is multiplied: no kernel reads it again. The adapters
beside the matrix are in the product as in `llmq.ops.matmul_adapted`.
"""

from __future__ import annotations

from llmq.base.dtypes import BF16, E4M3, F32, I32, DType
from llmq.base.operand import Fp8Out, ProductCodes
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    CAPABILITY,
    FP8_ARGS,
    MULTIPLE,
    PRODUCT_SHARED,
    PRODUCT_THREADS,
    abs_max_consts,
    expect_adapters,
    expect_operands,
    fp8_args,
    fp8_consts,
    own_product_blocks,
    rank_consts,
)
from llmq.runtime.cost import product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect, formats

OP = "matmul_swiglu.forward"
TILE = (256, 96)  # of out, of a cluster of two blocks

FORWARD = Kernel(
    "matmul_swiglu.cu",
    "matmul_swiglu",
    args="U*? up_gate, bf16*? out, const A[128]* a, const A[96]* b, const bf16[128]*? h, "
    "const bf16[96]*? tail, const f32*? scale_a, const f32*? scale_b, i32 M, i32 F, i32 K, "
    "inout f32*? abs_max, " + FP8_ARGS + ", const f32*? up_scale, const f32*? up_factor, "
    "f32*? up_largest, inout i32*? up_found, inout f32*? up_abs_max, inout i32*? up_saturated",
    capability=CAPABILITY,
)


def forward(
    dev: Device,
    up_gate: Tensor | ProductCodes | None,
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
    of `swiglu.forward`, which reads that. With gelu it is GeGLU. If up_gate are codes, the product
    is `matmul_fp8`, and all of this is their reader; without out and fp8 there is none.

    Args (contiguous; M and F multiples of 16, rows of multiples of 16 bytes):
        up_gate     out    BF16            (M,2F)  [up | gate] along the last dimension; or None; or
                                                   ProductCodes (E4M3) of fp8 codes without h
        out         out    BF16            (M,F)   may be None with fp8, and with codes
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
    product, reads = None, out is not None or fp8 is not None
    if isinstance(up_gate, ProductCodes):
        product, up_gate = up_gate, up_gate.codes
    if not reads and (product is None or up_gate is None):
        raise TypeError(f"{OP}: out, fp8 or codes as up_gate must be given, all are None")
    R = _check(up_gate, out, a, b, h, tail, scale_a, scale_b, E4M3 if product else BF16)
    consts = abs_max_consts(OP, abs_max) | fp8_consts(OP, fp8, M, F)
    consts |= {"UP_GATE": int(up_gate is not None), "OUT": int(out is not None)}
    consts |= {"GELU": int(gelu), "CODED": int(product is not None)} | rank_consts(R)
    operands, sizes = (a, b, h, tail, scale_a, scale_b), (M, F, K)
    written = (abs_max, *fp8_args(fp8), *_of_codes(product, a, R, reads))
    how = {"trans_b": True, "fast": True, "turns": consts["CODES"] == consts["TRANSPOSED"] == 1}
    how |= {"epilogue": "swiglu", "rank": R, "besides": formats((up_gate, out, *written))}
    dev.launch(
        FORWARD,
        own_product_blocks(dev, M, F, TILE),
        PRODUCT_THREADS,
        (up_gate, out, *operands, *sizes, *written),
        consts=consts,
        smem=PRODUCT_SHARED,
        cost=product_cost((M, 2 * F, K), a.dtype, E4M3 if product else BF16, **how),
    )


def _of_codes(
    product: ProductCodes | None, a: Tensor, R: int, reads: bool
) -> tuple[Tensor | None, ...]:
    """The last arguments of the kernel. reads: whether it is the codes' reader."""
    if product is None:
        return (None,) * 6
    if a.dtype != E4M3 or R:
        raise TypeError(f"{OP}: up_gate can be codes only of a product of fp8 codes, without h")
    given = {"scale": F32, "factor": F32, "largest": F32, "found": I32}
    if reads and product.abs_max is not None:
        given |= {"abs_max": F32, "saturated": I32}
    for name, dtype in given.items():
        shape = (4,) if name == "found" else (1,)
        expect(OP, f"up_gate.{name}", getattr(product, name), dtype, shape)
    args = [getattr(product, name) for name in given]
    return (*args, *[None] * (6 - len(args)))


def _check(
    up_gate: Tensor | None,
    out: Tensor | None,
    a: Tensor,
    b: Tensor,
    h: Tensor | None,
    tail: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    dtype: DType,
) -> int:
    """Shapes and dtypes, as forward's; dtype: up_gate's. Returns R, 0 without h and tail."""
    if b.shape[0] % 2:
        raise ValueError(f"{OP}: b must have rows of up and of gate, got {b.shape}")
    (M, K), N = a.shape, b.shape[0]
    if M % MULTIPLE or N % (2 * MULTIPLE):
        raise ValueError(f"{OP}: M and F must be multiples of {MULTIPLE}, got {M} and {N // 2}")
    if up_gate is not None:
        expect(OP, "up_gate", up_gate, dtype, (M, N))
    if out is not None:
        expect(OP, "out", out, BF16, (M, N // 2))
    expect_operands(OP, a, b, scale_a, scale_b, dtypes=(E4M3, BF16), codes=(E4M3,))
    expect(OP, "b", b, None, (N, K))
    return expect_adapters(OP, h, tail, M, N, transposed=False)
