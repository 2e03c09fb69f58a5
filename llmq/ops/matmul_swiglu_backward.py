"""The down product's input gradient for Hopper, with the gradient of SwiGLU or GeGLU behind it.

One launch: the gradient of the activation never reaches device memory. The results that the product
has in registers are rounded as they would be kept, and the gradients of up and gate are computed of
that while the next tile is multiplied. The adapters beside the matrix are in the product as in
`llmq.ops.matmul_adapted`.
"""

from __future__ import annotations

from llmq.base.dtypes import BF16, E4M3, E5M2
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    BOXES_BYTES,
    CAPABILITY,
    FP8_ARGS,
    MULTIPLE,
    PRODUCT_STAGES,
    PRODUCT_THREADS,
    PRODUCT_TILE,
    STAGE_BYTES,
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

OP = "matmul_swiglu_backward"
COLUMNS = 64  # F is a multiple of them: what the epilogue's warps share
TURNED_BYTES = 32768  # two boxes of transposed codes of up and of gate; there is a stage less then
BARRIERS = 64  # of 8 bytes: as many as there are, and some more


def _kernel(b_rows: int) -> Kernel:
    """b_rows: of the half of a tile of b, or with K outside of a third of it."""
    return Kernel(
        f"{OP}.cu",
        OP,
        args=f"bf16*? d_up_gate, const A[128]* a, const B[{b_rows}]* b, const bf16[128]*? h, "
        "const bf16[32]*? tail, const f32*? scale_a, const f32*? scale_b, const bf16* up_gate, "
        f"i32 M, i32 F, i32 K, inout f32*? abs_max, {FP8_ARGS}, bf16*? out",
        capability=CAPABILITY,
    )


CODES_B, HALVES_B = _kernel(96), _kernel(32)


def backward(
    dev: Device,
    d_up_gate: Tensor | None,
    a: Tensor,
    b: Tensor,
    up_gate: Tensor,
    h: Tensor | None = None,
    tail: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    gelu: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
    out: Tensor | None = None,
) -> None:
    """d_up_gate of d_out = scale_a * scale_b * (a @ b) + h @ tail, as `swiglu.backward` defines it.

    The bits are those of `matmul_adapted` (fp8: with fast accumulation), which rounds d_out, and of
    `swiglu.backward`, which reads that. With gelu of GeGLU. If forward's result was not kept, it
    can be written again, but not its codes: with these, two kernels take less time.

    Args (contiguous; M a multiple of 16, F of 64; rows of multiples of 16 bytes):
        d_up_gate  out    BF16                (M,2F)  [d_up | d_gate]; may be up_gate; None with fp8
        a          in     BF16, E4M3 or E5M2  (M,K)   the gradient of the down product's result
        b          in     as a, not E5M2      (K,F)   codes (F,K): they are transposed
        up_gate    in     BF16                (M,2F)
        h          in     BF16                (M,R)   R at most MAX_RANK; or None
        tail       in     BF16                (R,F)   or None, with h
        scale_a    in     F32                 (1,)    of fp8 codes, else None
        scale_b    in     F32                 (1,)
        abs_max    inout  F32                 (1,)    or None; raised to the largest |d_up_gate|
        fp8        out                        (M,2F)  or None; d_up_gate in FP8
        out        out    BF16                (M,F)   or None; the bits of forward's out

    Cost:    2*M*F*(K+R) FLOPs; one launch. Needs compute capability 9.0.
    Raises:  TypeError for a wrong dtype or no result, ValueError for a wrong shape.
    """
    (M, K), F, R = _check(a, b, up_gate, h, tail, scale_a, scale_b)
    consts = _results(d_up_gate, (M, F), abs_max, fp8, out)
    consts |= {"GELU": int(gelu)} | rank_consts(R)
    operands = (a, b, h, tail, scale_a, scale_b, up_gate)
    # A square b counts as transposed, too: card files have it so.
    how = {"trans_b": b.shape == (F, K), "fast": True, "epilogue": "swiglu_backward"}
    how["besides"] = formats((d_up_gate, up_gate, abs_max, *fp8_args(fp8), out))
    how["turns"] = consts["CODES"] == consts["TRANSPOSED"] == 1
    dev.launch(
        HALVES_B if a.dtype == BF16 else CODES_B,
        own_product_blocks(dev, M, F, PRODUCT_TILE),
        PRODUCT_THREADS,
        (d_up_gate, *operands, M, F, K, abs_max, *fp8_args(fp8), out),
        consts=consts,
        smem=_shared(consts),
        cost=product_cost((M, F, K), a.dtype, BF16, rank=R, **how),
    )


def _check(
    a: Tensor, b: Tensor, up_gate: Tensor, h: Tensor | None, tail: Tensor | None, *scales
) -> tuple[tuple[int, ...], int, int]:
    """The shape of a, F and R, if what is read fits together."""
    expect_operands(OP, a, b, *scales, dtypes=(BF16, E4M3, E5M2), codes=(E4M3,))
    K, halves = a.shape[1], a.dtype == BF16
    F = b.shape[1 if halves else 0]
    expect(OP, "b", b, None, (K, F) if halves else (F, K))
    M = a.shape[0]
    if M % MULTIPLE or F % COLUMNS:
        raise ValueError(
            f"{OP}: M and F must be multiples of {MULTIPLE} and {COLUMNS}, got {M} and {F}"
        )
    expect(OP, "up_gate", up_gate, BF16, (M, 2 * F))
    return a.shape, F, expect_adapters(OP, h, tail, M, F, transposed=True)


def _results(
    d_up_gate: Tensor | None,
    shape: tuple[int, int],
    abs_max: Tensor | None,
    fp8: Fp8Out | None,
    out: Tensor | None,
) -> dict[str, int]:
    """The constants that switch what is written on and off. shape: of out."""
    M, F = shape
    if d_up_gate is not None or fp8 is None:
        expect(OP, "d_up_gate", d_up_gate, BF16, (M, 2 * F))
    consts = abs_max_consts(OP, abs_max) | fp8_consts(OP, fp8, M, 2 * F)
    if out is not None:
        expect(OP, "out", out, BF16, shape)
    return consts | {"TENSOR": int(d_up_gate is not None), "OUT": int(out is not None)}


def _shared(consts: dict[str, int]) -> int:
    """Bytes: stages, the tile of d_out, transposed codes, barriers, alignment."""
    turned = consts["TRANSPOSED"] * (TURNED_BYTES - STAGE_BYTES)
    tiles = PRODUCT_STAGES * STAGE_BYTES + BOXES_BYTES + turned
    return tiles + 8 * BARRIERS + 1024
