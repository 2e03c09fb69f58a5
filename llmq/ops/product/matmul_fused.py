"""Matrix products on Hopper, with their epilogue in one launch.

    x = alpha * scale_a * scale_b * (a @ b^T) + h @ tail^T     and out = epilogue(x)

Separate kernels would write x, read x for the adapters' product h @ tail^T and write x again, and
read x for the epilogue. Here adapters are the last tiles of the sum, and an epilogue takes the
sums, rounded as x would be, while the next tile is multiplied. Sums are F32; products of fp8 codes
are summed with fast accumulation (`ops.product.matmul.matmul_fp8`), except in `gradient`.

Operands of all functions: contiguous, rows of multiples of 16 bytes; compute capability 9.0.

    a           in   BF16, E4M3 or E5M2   (M,K)
    b           in   as a, not E5M2 twice (N,K)
    h           in   BF16                 (M,R)   R at most MAX_RANK; or None
    tail        in   BF16                 (N,R)   or None, with h
    scale_a     in   F32                  (1,)    of fp8 codes, else None
    scale_b     in   F32                  (1,)
    alpha                                         of `adapted`, `gradient` and `swiglu_backward`;
                                                  compiled in unless 1

TypeError for a wrong dtype or no result, ValueError for a wrong shape.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from llmq.base.dtypes import BF16, FP8
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    CAPABILITY,
    MULTIPLE,
    NARROW,
    TILE_ROWS,
    WIDE,
    Tiles,
    abs_max_consts,
    again_args,
    again_consts,
    declared_again,
    declared_fp8,
    expect_scales,
    fp8_args,
    fp8_consts,
    tile_columns,
)
from llmq.runtime.cost import Cost, product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, formats

MAX_RANK, RANK_STEP = 128, 16  # R is compiled in, in steps of one mma instruction's depth
MAX_EXPERTS, GROUPED_DEPTH = 512, 64  # of `grouped`: experts; divisor of K if K is outermost
GRADIENT_COLUMNS = 64  # divisor of F in `swiglu_backward`, whose warps share these columns
# Without fast accumulation, the tensor cores' sum of 14 significant bits is added to an F32 sum
# after PART_STEPS steps of 128 terms.
PART_STEPS = 4

# Bytes of shared memory for: a block, barriers and alignment, a tile's three boxes, two boxes of
# transposed codes, 16 rows of a box.
SHARED, BARRIERS, BOXES, TRANSPOSED, CHUNK = 227 << 10, 1536, 3 * 16384, 16384, 2048
LINE = 128  # bytes of K in a tile
ALL_CODES = "A=bf16|e4m3|e5m2, B=bf16|e4m3|e5m2"  # a and b must not both be e5m2
OUTSIDE = 32  # rows of half a tile whose outer dimension is K


@cache
def _kernel(
    entry: str, shapes: tuple[str, str, str], boxes: tuple[int, int, int], own: str, types: str
) -> Kernel:
    """Declaration of a kernel. shapes: shapes of a, b and tail. boxes: rows of a TMA box of a and
    h, of b, and of tail. own: arguments beside the operands. types: see Kernel."""
    (a, b, tail), (a_rows, b_rows, tail_rows) = shapes, boxes
    return Kernel(
        "product/matmul_fused.cu",
        entry,
        f"box{a_rows} A[{a}] a, box{b_rows} B[{b}] b, box{a_rows} bf16[M,R]? h, "
        f"box{tail_rows} bf16[{tail}]? tail, f32[1]? scale_a, f32[1]? scale_b, "
        f"i32 M, i32 N, i32 K, f32 alpha, {own}",
        where=f"R <= {MAX_RANK}",
        types=types,
        capability=CAPABILITY,
    )


class _Product(NamedTuple):
    """Operands and sizes of a product. b_outside, tail_outside: True if K is the outer dimension of
    b, and R of tail. shapes: shapes of a, b and tail in the declaration. types: dtypes of A and B,
    see Kernel."""

    operands: tuple[Tensor | None, ...]
    M: int
    N: int
    K: int
    rank: int
    b_outside: bool
    tail_outside: bool
    shapes: tuple[str, str, str]
    types: str
    alpha: float = 1.0

    @classmethod
    def of(
        cls,
        op: str,
        a: Tensor,
        b: Tensor,
        h: Tensor | None = None,
        tail: Tensor | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        *,
        types: str = "A=bf16|e4m3|e5m2, B=bf16|e4m3",
        transposed: bool = False,
        alpha: float = 1.0,
        experts: int = 0,
    ) -> _Product:
        """Return a product of these operands. transposed: True if tail is (R, N), and a BF16 b is
        (K, N). experts: number of experts, whose matrices lie below each other in b and tail; 0: no
        experts. TypeError or ValueError for operands that no declaration describes."""
        expect_scales(op, a, b, scale_a, scale_b)
        if (a.dtype in FP8) is not (b.dtype in FP8) or (h is None) is not (tail is None):
            raise TypeError(f"{op}: fp8 codes multiply fp8 codes, and h needs tail")
        for name, x in (("a", a), ("b", b), *[("h", h)] * (h is not None)):
            if len(x.shape) != 2:
                raise ValueError(f"{op}: {name} must have 2 dimensions, got {x.shape}")
        outside, per = transposed and a.dtype is BF16, "experts*" if experts else ""
        (M, K), N = a.shape, b.shape[1] if outside else b.shape[0] // max(experts, 1)
        shapes = "M,K", f"{per}K,N" if outside else f"{per}N,K"
        shapes = *shapes, f"{per}R,N" if transposed else f"{per}N,R"
        operands, R = (a, b, h, tail, scale_a, scale_b), 0 if h is None else h.shape[1]
        return cls(operands, M, N, K, R, outside, transposed, shapes, types, alpha)

    def launch(
        self,
        dev: Device,
        entry: str,
        own: str,
        args: tuple,
        cost: Cost,
        *,
        columns: int = NARROW,
        paired: bool = False,
        threads: int = 512,
        beside: int = BOXES,
        consts: dict[str, int] | None = None,
        count: int | None = None,
        a_rows: int = 128,
    ) -> None:
        """Launch the kernel `entry`. own: declaration of its arguments beside the operands. args:
        values of these arguments. columns: columns of a tile. paired: True if up and gate have half
        of these columns each. beside: bytes of shared memory beside the stages of a and b, which
        fill the rest. count: number of tiles; None: tiles of one result (M, N). a_rows: rows of a
        TMA box of a."""
        N = self.N // (1 + paired)
        tiles = Tiles.of(dev, self.M, N, columns // (1 + paired))
        pair = LINE * (TILE_ROWS // 2 + ceil_div(columns, 64) * 64)
        stages = (SHARED - BARRIERS - beside) // pair
        outside = self.b_outside, self.tail_outside
        boxes = (a_rows, *(OUTSIDE if way else columns // 2 for way in outside))
        dev.launch(
            _kernel(entry, self.shapes, boxes, own, f"{self.types}, T=bf16"),
            2 * min(count or tiles.count, tiles.clusters),
            threads,
            (*self.operands, self.M, N, self.K, self.alpha, *args),
            consts={
                "B_K_OUTSIDE": int(self.b_outside),
                "TAIL_K_OUTSIDE": int(self.tail_outside),
                "RANK": RANK_STEP * ceil_div(self.rank, RANK_STEP),
                "RING_STAGES": stages,
                "TILE_WIDTH": columns,
            }
            | ({} if self.alpha == 1 else {"HAS_ALPHA": 1})
            | (consts or {}),
            smem=stages * pair + beside + BARRIERS,
            cost=cost,
        )


def adapted(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    h: Tensor | None = None,
    tail: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    transposed: bool = False,
    alpha: float = 1.0,
) -> None:
    """out = alpha * scale_a * scale_b * (a @ b^T) + h @ tail^T + bias + addend, rounded once.

    Args (beside those of all):
        out         out  BF16  (M,N)
        bias        in   BF16  (N,)    or None
        addend      in   BF16  (M,N)   or None; other memory than out
        transposed                     tail is (R,N), and a BF16 b (K,N)

    Cost:    2*M*N*(K+R) FLOPs; one launch.
    """
    op = "matmul_adapted"
    operands = (a, b, h, tail, scale_a, scale_b)
    p = _Product.of(op, *operands, types=ALL_CODES, transposed=transposed, alpha=alpha)
    columns = tile_columns(dev, p.M, p.N, a.dtype.itemsize * p.K)
    cost = product_cost(
        (p.M, p.N, p.K), a.dtype, BF16, fast=True, epilogue="adapted", rank=p.rank,
        trans_b=b.shape == (p.N, p.K),  # True for a square b, as in card files
        addend=addend is not None,
    )  # fmt: skip
    p.launch(
        dev,
        op,
        "box16 out bf16[M,N] out, bf16[N]? bias, box16 bf16[M,N]? addend",
        (out, bias, addend),
        cost,
        columns=columns,
        threads=384,
        beside=(16 if columns == WIDE else 8) * CHUNK,
        consts={"BIAS": int(bias is not None), "ADDEND": int(addend is not None)},
    )


def grouped(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    h: Tensor | None = None,
    tail: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> None:
    """out[r] = scale_a * scale_b * (a[r] @ b[e]^T) + h[r] @ tail[e]^T + bias[e]; e: r's expert.

    Args (beside those of all; at most 512 experts):
        out         out  BF16  (M,N)
        b           in         (E,N,K)
        starts      in   I32   (E+1,)   rows [starts[e], starts[e + 1]) are expert e's; from 0 to M
        tail        in   BF16  (E,N,R)  or None, with h
        bias        in   BF16  (E,N)    or None
        transposed                      tail is (E,R,N), and BF16 b (E,K,N), K a multiple of 64

    Cost:    2*M*N*(K+R) FLOPs; one launch.
    """
    op = "matmul_grouped"
    if len(b.shape) != 3 or (tail is not None and len(tail.shape) != 3):
        raise ValueError(f"{op}: b and tail must have 3 dimensions, got {b.shape}")
    E = b.shape[0]
    flat, tail = (x and x.view(x.shape[0] * x.shape[1], x.shape[2]) for x in (b, tail))
    operands = (a, flat, h, tail, scale_a, scale_b)
    p = _Product.of(op, *operands, types=ALL_CODES, transposed=transposed, experts=E)
    M, N, K = p.M, p.N, p.K
    if E > MAX_EXPERTS or (p.b_outside and K % GROUPED_DEPTH):
        limits = f"at most {MAX_EXPERTS} experts, and K outside in multiples of {GROUPED_DEPTH}"
        raise ValueError(f"{op}: {limits}, got {E} and {K}")
    cost = product_cost(
        (M, N, K), a.dtype, BF16, fast=True, epilogue="grouped", rank=p.rank,
        trans_b=not p.b_outside,
    )  # fmt: skip
    p.launch(
        dev,
        op,
        "out bf16[M,N] out, bf16[experts,N]? bias, i32[experts+1] starts, i32 experts",
        (out, bias, starts, E),
        cost,
        threads=384,
        beside=8 * CHUNK,
        consts={"BIAS": int(bias is not None), "GROUPED": 1, "TAIL_ROWS": p.rank},
        count=(ceil_div(M, TILE_ROWS) + E) * ceil_div(N, NARROW),  # most tiles of any routing
        a_rows=TILE_ROWS // 4,
    )


def grouped_gradient(dev: Device, acc: Accumulator, a: Tensor, b: Tensor, starts: Tensor) -> None:
    """acc[e] (M,N) = or += a^T @ b over the rows of expert e.

    An expert without rows gets 0, or keeps acc if it accumulates. Rounding: see
    `grouped.grouped_gradient`.

    Args (beside those of all; M and N multiples of 8):
        acc     inout  Accumulator BF16 (E,M,N)
        a       in     BF16 (R,M)
        b       in     BF16 (R,N)
        starts  in     I32  (E+1,)   rows [starts[e], starts[e + 1]) are expert e's; from 0 to R

    Cost:    2*R*M*N FLOPs; one launch.
    """
    op = "matmul_grouped_gradient"
    (R, M), N, E = a.shape, b.shape[1], starts.size - 1
    tensor, accumulate, scalars, salt = acc
    operands = (a, b, None, None, None, None)
    shapes = ("K,M", "K,N", "N,R")
    p = _Product(operands, M, N, R, 0, True, False, shapes, "A=bf16, B=bf16")
    cost = product_cost(
        (M, N, R), BF16, BF16, trans_a=True, accumulate=accumulate, epilogue="grouped"
    )
    p.launch(
        dev,
        op,
        "inout bf16[experts,M,N] d, i32[16] scalars, i32 accumulate, u32 salt, "
        "i32[experts+1] starts, i32 experts",
        (tensor, scalars, int(accumulate), salt, starts, E),
        cost,
        threads=384,
        beside=8 * NARROW // 64 * CHUNK,
        consts={"GROUPED": 2},
        count=E * ceil_div(M, TILE_ROWS) * ceil_div(N, NARROW),
        a_rows=2 * OUTSIDE,
    )


def gradient(
    dev: Device,
    acc: Accumulator,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    fast_accumulation: bool = False,
    alpha: float = 1.0,
) -> None:
    """acc.tensor += BF16(alpha * scale_a * scale_b * (a @ b^T)), or = without acc.accumulate.

    The result has the same bits as the product followed by `reduce.add`.

    Args (a and b are fp8 codes, b E4M3):
        acc.tensor   inout  BF16  (M,N)   sums are rounded stochastically
        fast_accumulation                 as in matmul_fp8

    Cost:    2*M*N*K FLOPs; acc.tensor written once, and read once if it is added to; one launch.
    """
    op = "matmul_gradient"
    operands = (a, b, None, None, scale_a, scale_b)
    p = _Product.of(op, *operands, types="A=e4m3|e5m2, B=e4m3", alpha=alpha)
    sizes = p.M, p.N, p.K
    if 2 * p.N % MULTIPLE or p.K % MULTIPLE:
        raise ValueError(f"{op}: rows must have multiples of {MULTIPLE} bytes, got {sizes}")
    part_steps = 0 if fast_accumulation else PART_STEPS
    access = "inout" if acc.accumulate else "out"
    cost = product_cost(
        sizes, a.dtype, BF16,
        accumulate=acc.accumulate, fast=fast_accumulation, epilogue="gradient",
    )  # fmt: skip
    p.launch(
        dev,
        op,
        f"{access} bf16[M,N] d, i32[16] scalars, i32 accumulate, u32 salt, i32 part_steps",
        (acc.tensor, acc.scalars, int(acc.accumulate), acc.salt, part_steps),
        cost,
        consts={"EXACT": int(part_steps > 0)},
    )


def swiglu(
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
    """up_gate = scale_a * scale_b * (a @ b^T) + h @ tail^T, and out = up * silu(gate).

    Results have the same bits as `adapted`, which rounds up_gate, followed by `swiglu.forward`.
    With gelu out = up * gelu(gate).

    Args (a: BF16 or E4M3; N is 2F: rows of up, then rows of gate; M, F multiples of 16):
        up_gate     out    BF16   (M,2F)  [up | gate] along the last dimension; or None
        out         out    BF16   (M,F)   may be None with fp8
        abs_max     inout  F32    (1,)    or None; raised to the largest |out|
        fp8         out           (M,F)   or None; out in FP8

    Cost:    4*M*F*(K+R) FLOPs; one launch.
    """
    op = "matmul_swiglu"
    if out is None and fp8 is None:
        raise TypeError(f"{op}: out or fp8 must be given, both are None")
    if b.shape[0] % 2:
        raise ValueError(f"{op}: b must have rows of up and of gate, got {b.shape}")
    p = _Product.of(op, a, b, h, tail, scale_a, scale_b, types="A=bf16|e4m3, B=bf16|e4m3")
    p = p._replace(shapes=("M,K", "2*N,K", "2*N,R"))  # the kernel's N is F
    M, F = p.M, p.N // 2
    if M % MULTIPLE or F % MULTIPLE:
        raise ValueError(f"{op}: M and F must be multiples of {MULTIPLE}, got {M} and {F}")
    consts = {"UP_GATE": int(up_gate is not None), "OUT": int(out is not None)}
    consts |= abs_max_consts(abs_max) | fp8_consts(op, fp8, M, F) | {"GELU": int(gelu)}
    results = (up_gate, out, abs_max, *fp8_args(fp8))
    cost = product_cost(
        (M, 2 * F, p.K), a.dtype, BF16, trans_b=True, fast=True, epilogue="swiglu", rank=p.rank,
        transposes=consts["CODES"] == consts["TRANSPOSED"] == 1,
        besides=formats((*results, *[None] * 6)),  # as in card files
    )  # fmt: skip
    p.launch(
        dev,
        op,
        "out bf16[M,2*N]? up_gate, out bf16[M,N]? out, inout f32[1]? abs_max, "
        + declared_fp8("M", "N"),
        results,
        cost,
        paired=True,
        consts=consts,
    )


def swiglu_backward(
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
    out_fp8: Fp8Out | None = None,
    alpha: float = 1.0,
) -> None:
    """d_up_gate from d_out = x, with the same bits as `adapted` followed by `swiglu.backward`.

    Args (N is F; b is BF16 or E4M3; M a multiple of 16, F of 64):
        d_up_gate  out    BF16  (M,2F)  [d_up | d_gate]; may be up_gate; None with fp8
        b          in           (K,F)   codes are transposed, (F,K)
        up_gate    in     BF16  (M,2F)
        tail       in     BF16  (R,F)   or None, with h
        abs_max    inout  F32   (1,)    or None; raised to the largest |d_up_gate|
        fp8        out          (M,2F)  or None; d_up_gate in FP8
        out        out    BF16  (M,F)   or None; forward's output
        out_fp8    out          (M,F)   or None; forward's output in E4M3, transposed, without out

    Cost:    2*M*F*(K+R) FLOPs; one launch.
    """
    op = "matmul_swiglu_backward"
    p = _Product.of(op, a, b, h, tail, scale_a, scale_b, transposed=True, alpha=alpha)
    M, F = p.M, p.N
    if M % MULTIPLE or F % GRADIENT_COLUMNS:
        sizes = f"{MULTIPLE} and {GRADIENT_COLUMNS}, got {M} and {F}"
        raise ValueError(f"{op}: M and F must be multiples of {sizes}")
    if d_up_gate is None and fp8 is None:
        raise TypeError(f"{op}: d_up_gate or fp8 must be given, both are None")
    consts = {"D_UP_GATE": int(d_up_gate is not None)} | abs_max_consts(abs_max)
    consts |= fp8_consts(op, fp8, M, 2 * F) | again_consts(op, out, out_fp8) | {"GELU": int(gelu)}
    written, again = (abs_max, *fp8_args(fp8)), again_args(out, out_fp8)
    cost = product_cost(
        (M, F, p.K), a.dtype, BF16, fast=True, epilogue="swiglu_backward", rank=p.rank,
        trans_b=b.shape == (F, p.K),  # True for a square b, as in card files
        transposes=consts["CODES"] == consts["TRANSPOSED"] == 1,
        besides=formats((d_up_gate, up_gate, *written, out or again[1])),
    )  # fmt: skip
    p.launch(
        dev,
        op,
        "out T[M,2*N]? d_up_gate, T[M,2*N] up_gate, inout f32[1]? abs_max, "
        f"{declared_fp8('M', '2*N')}, {declared_again('M', 'N')}",
        (d_up_gate, up_gate, *written, *again),
        cost,
        beside=BOXES + (2 * consts["TRANSPOSED"] + consts["OUT_TRANSPOSED"]) * TRANSPOSED,
        consts=consts,
    )
