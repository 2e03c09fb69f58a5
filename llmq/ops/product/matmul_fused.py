"""Matrix products of our own, each with what follows it: one launch.

    x = alpha * scale_a * scale_b * (a @ b^T) + h @ tail^T     and of x what the epilogue makes

A kernel behind a product reads what the product has just written, and the product of the adapters
beside a matrix, which is short and wide, reads the first one's result and writes it again. Here an
epilogue takes the sums, rounded as they would be kept, while the next tile is multiplied, and
adapters are the last tiles of the sum. Sums are F32; fp8 codes are added as with fast accumulation
(`ops.product.matmul.matmul_fp8`), but for `gradient`.

For all: operands are contiguous, with rows of multiples of 16 bytes; compute capability 9.0.

    a           in   BF16, E4M3 or E5M2   (M,K)
    b           in   as a, not E5M2 twice (N,K)
    h           in   BF16                 (M,R)   R at most MAX_RANK; or None
    tail        in   BF16                 (N,R)   or None, with h
    scale_a     in   F32                  (1,)    of fp8 codes, else None
    scale_b     in   F32                  (1,)
    alpha                                         of `adapted`, `gradient` and `swiglu_backward`;
                                                  compiled in where it is not 1

Raises TypeError for a wrong dtype or no result, ValueError for a wrong shape.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from llmq.base.dtypes import BF16, E4M3, E5M2, I32, STEP_SCALARS_WORDS, DType
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
    expect_added,
    expect_matrix,
    expect_operands,
    fp8_args,
    fp8_consts,
    tile_columns,
)
from llmq.runtime.cost import Cost, product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect, formats

MAX_RANK, RANK_STEP = 128, 16  # R is compiled in, in steps of what one instruction multiplies
MAX_EXPERTS, GROUPED_DEPTH = 512, 64  # experts of `grouped`, and what K is of where it is outside
GRADIENT_COLUMNS = 64  # F is a multiple of them in `swiglu_backward`: what its warps share
# If sums may not be fast, the tensor cores' sum, of 14 significant bits, is added to one in F32
# after so many steps of 128.
PART_STEPS = 4

# Bytes of shared memory: of a block, of barriers and alignment, of a tile's three boxes, of two
# boxes of transposed codes, of 16 rows of a box.
SHARED, BARRIERS, BOXES, TRANSPOSED, CHUNK = 227 << 10, 1536, 3 * 16384, 16384, 2048
LINE = 128  # bytes of K in a tile
OUTSIDE = 32  # rows of the half of one where K is the outer dimension


@cache
def _kernel(entry: str, own: str, *boxes: int) -> Kernel:
    """own: its arguments beside the operands. boxes: the rows of a box of a and of h, and of the
    half of a tile of b and of tail."""
    a, b, h, tail = boxes[0], boxes[1], boxes[0], boxes[2]
    return Kernel(
        "product/matmul_fused.cu",
        entry,
        args=f"const A[{a}]* a, const B[{b}]* b, const bf16[{h}]*? h, const bf16[{tail}]*? tail, "
        f"const f32*? scale_a, const f32*? scale_b, i32 M, i32 N, i32 K, f32 alpha, {own}",
        capability=CAPABILITY,
    )


def _rank(
    op: str, h: Tensor | None, tail: Tensor | None, M: int, experts: tuple, N: int, transposed: bool
) -> int:
    """R of h (M, R) and tail (*experts, N, R), or if transposed (*experts, R, N); 0: none is given.
    Raises as an operation must unless they are so."""
    if h is None and tail is None:
        return 0
    if h is None or len(h.shape) != 2 or not 0 < h.shape[1] <= MAX_RANK:
        raise ValueError(f"{op}: h must be (M, R) with R from 1 to {MAX_RANK}, got {h!r}")
    R = h.shape[1]
    expect(op, "h", h, BF16, (M, R))
    expect(op, "tail", tail, BF16, (*experts, *((R, N) if transposed else (N, R))))
    return R


class _Product(NamedTuple):
    """Operands that fit each other, and whether K is the outer dimension of b and of tail."""

    operands: tuple[Tensor | None, ...]
    M: int
    N: int
    K: int
    rank: int
    b_outside: bool
    tail_outside: bool
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
        dtypes: tuple[DType, ...] = (BF16, E4M3, E5M2),
        codes: tuple[DType, ...] = (E4M3,),
        transposed: bool = False,
        alpha: float = 1.0,
    ) -> _Product:
        """dtypes, codes: as expect_operands. transposed: tail is (R, N), and b (K, N), if BF16."""
        expect_operands(op, a, b, scale_a, scale_b, dtypes=dtypes, codes=codes)
        outside = transposed and a.dtype == BF16
        (M, K), N = a.shape, b.shape[1 if outside else 0]
        expect(op, "b", b, None, (K, N) if outside else (N, K))
        R = _rank(op, h, tail, M, (), N, transposed)
        operands = (a, b, h, tail, scale_a, scale_b)
        return cls(operands, M, N, K, R, outside, transposed, alpha)

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
        """own, args: what the kernel takes beside the operands. columns: of a tile; paired: half of
        them are a result's. beside: bytes of shared memory beside pairs of tiles of a and b, of
        which there are as many as it has place for. count: tiles of all results, where there are
        several of (M, N), or of other rows. a_rows: of a box of a."""
        N = self.N // (1 + paired)
        tiles = Tiles.of(dev, self.M, N, columns // (1 + paired))
        pair = LINE * (TILE_ROWS // 2 + ceil_div(columns, 64) * 64)
        stages = (SHARED - BARRIERS - beside) // pair
        outside = self.b_outside, self.tail_outside
        boxes = (a_rows, *(OUTSIDE if way else columns // 2 for way in outside))
        dev.launch(
            _kernel(entry, own, *boxes),
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
        transposed                     out = a @ b + h @ tail, but for fp8 codes b

    Cost:    2*M*N*(K+R) FLOPs; one launch.
    """
    op = "matmul_adapted"
    expect_matrix(op, "out", out, (BF16,))
    operands = (a, b, h, tail, scale_a, scale_b)
    p = _Product.of(op, *operands, codes=(E4M3, E5M2), transposed=transposed, alpha=alpha)
    expect(op, "out", out, BF16, (p.M, p.N))
    expect_added(op, out, bias, addend)
    columns = tile_columns(dev, p.M, p.N, a.dtype.itemsize * p.K)
    how = {"trans_b": b.shape == (p.N, p.K), "addend": addend is not None}  # a square b counts, too
    p.launch(
        dev,
        op,
        "bf16[16]* out, const bf16*? bias, const bf16[16]*? addend",
        (out, bias, addend),
        product_cost(
            (p.M, p.N, p.K), a.dtype, BF16, fast=True, epilogue="adapted", rank=p.rank, **how
        ),
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
    """out[r] = scale_a * scale_b * (a[r] @ b[e]^T) + h[r] @ tail[e]^T + bias[e] of rows that are
    sorted by expert.

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
    expect_matrix(op, "out", out, (BF16,))
    if len(b.shape) != 3:
        raise ValueError(f"{op}: b must have 3 dimensions, got {b.shape}")
    E, flat = b.shape[0], b.view(b.shape[0] * b.shape[1], b.shape[2])
    expect_operands(op, a, flat, scale_a, scale_b, dtypes=(BF16, E4M3, E5M2), codes=(E4M3, E5M2))
    outside = transposed and a.dtype == BF16
    (M, N), K = out.shape, a.shape[1]
    expect(op, "a", a, None, (M, K))
    expect(op, "b", b, None, (E, K, N) if outside else (E, N, K))
    expect(op, "starts", starts, I32, (E + 1,))
    if E > MAX_EXPERTS or (outside and K % GROUPED_DEPTH):
        limits = f"at most {MAX_EXPERTS} experts, and K outside in multiples of {GROUPED_DEPTH}"
        raise ValueError(f"{op}: {limits}, got {E} and {K}")
    if bias is not None:
        expect(op, "bias", bias, BF16, (E, N))
    R = _rank(op, h, tail, M, (E,), N, transposed)
    tail = tail and tail.view(E * tail.shape[1], tail.shape[2])
    p = _Product((a, flat, h, tail, scale_a, scale_b), M, N, K, R, outside, transposed)
    p.launch(
        dev,
        op,
        "bf16* out, const bf16*? bias, const i32* starts, i32 experts",
        (out, bias, starts, E),
        product_cost(
            (M, N, K), a.dtype, BF16, fast=True, epilogue="grouped", trans_b=not outside, rank=R
        ),
        threads=384,
        beside=8 * CHUNK,
        consts={"BIAS": int(bias is not None), "GROUPED": 1, "TAIL_ROWS": R},
        count=(ceil_div(M, TILE_ROWS) + E) * ceil_div(N, NARROW),  # no routing has more
        a_rows=TILE_ROWS // 4,
    )


def grouped_gradient(dev: Device, acc: Accumulator, a: Tensor, b: Tensor, starts: Tensor) -> None:
    """acc[e] (M,N) = or += a^T @ b over the rows of expert e, which are sorted.

    Without rows it becomes 0, or stays as it is. It is rounded as by `grouped.grouped_gradient`.

    Args (beside those of all; M and N multiples of 8):
        acc     inout  Accumulator BF16 (E,M,N)
        a       in     BF16 (R,M)
        b       in     BF16 (R,N)
        starts  in     I32  (E+1,)   rows [starts[e], starts[e + 1]) are expert e's; from 0 to R

    Cost:    2*R*M*N FLOPs; one launch.
    """
    op = "matmul_grouped_gradient"
    expect_operands(op, a, b, dtypes=(BF16,))
    (R, M), N, E = a.shape, b.shape[1], starts.size - 1
    expect(op, "b", b, BF16, (R, N))
    expect(op, "starts", starts, I32, (E + 1,))
    tensor, accumulate, scalars, salt = acc
    expect(op, "acc", tensor, BF16, (E, M, N))
    expect(op, "scalars", scalars, I32, (STEP_SCALARS_WORDS,))
    how = {"trans_a": True, "accumulate": accumulate, "epilogue": "grouped"}
    _Product((a, b, None, None, None, None), M, N, R, 0, True, False).launch(
        dev,
        op,
        "inout bf16* d, const i32* scalars, i32 accumulate, u32 salt, const i32* starts, "
        "i32 experts",
        (tensor, scalars, int(accumulate), salt, starts, E),
        product_cost((M, N, R), BF16, BF16, **how),
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

    The bits are those of the product alone, and of `reduce.add` behind it.

    Args (a and b are fp8 codes, b E4M3):
        acc.tensor   inout  BF16  (M,N)   sums are rounded stochastically
        fast_accumulation                 as in matmul_fp8; it is taken

    Cost:    2*M*N*K FLOPs; acc.tensor written once, and read once if it is added to; one launch.
    """
    op = "matmul_gradient"
    expect_matrix(op, "acc.tensor", acc.tensor, (BF16,))
    operands = (a, b, None, None, scale_a, scale_b)
    p = _Product.of(op, *operands, dtypes=(E4M3, E5M2), alpha=alpha)
    sizes = p.M, p.N, p.K
    expect(op, "acc.tensor", acc.tensor, BF16, sizes[:2])
    expect(op, "acc.scalars", acc.scalars, I32, (STEP_SCALARS_WORDS,))
    if 2 * p.N % MULTIPLE or p.K % MULTIPLE:
        raise ValueError(f"{op}: rows must have multiples of {MULTIPLE} bytes, got {sizes}")
    part_steps = 0 if fast_accumulation else PART_STEPS
    d = "inout bf16* d" if acc.accumulate else "bf16* d"  # one reads what it adds to
    how = {"accumulate": acc.accumulate, "fast": fast_accumulation, "epilogue": "gradient"}
    p.launch(
        dev,
        op,
        f"{d}, const i32* scalars, i32 accumulate, u32 salt, i32 part_steps",
        (acc.tensor, acc.scalars, int(acc.accumulate), acc.salt, part_steps),
        product_cost(sizes, a.dtype, BF16, **how),
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
    """up_gate = scale_a * scale_b * (a @ b^T) + h @ tail^T, and out = up * silu(gate) of it.

    The bits are those of `adapted` (fp8: with fast accumulation), which rounds up_gate, and of
    `swiglu.forward`, which reads that. With gelu it is GeGLU.

    Args (a: BF16 or E4M3; N is 2F, the rows of up and then those of gate; M, F multiples of 16):
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
    p = _Product.of(op, a, b, h, tail, scale_a, scale_b, dtypes=(E4M3, BF16))
    M, F = p.M, p.N // 2
    if M % MULTIPLE or F % MULTIPLE:
        raise ValueError(f"{op}: M and F must be multiples of {MULTIPLE}, got {M} and {F}")
    consts = _results(op, {"UP_GATE": (up_gate, BF16, (M, 2 * F)), "OUT": (out, BF16, (M, F))})
    consts |= abs_max_consts(abs_max) | fp8_consts(op, fp8, M, F) | {"GELU": int(gelu)}
    results = (up_gate, out, abs_max, *fp8_args(fp8))
    how = {"trans_b": True, "fast": True, "epilogue": "swiglu", "rank": p.rank}
    how["transposes"] = consts["CODES"] == consts["TRANSPOSED"] == 1
    how["besides"] = formats((*results, *[None] * 6))  # as card files have it
    p.launch(
        dev,
        op,
        "bf16*? up_gate, bf16*? out, inout f32*? abs_max, " + declared_fp8("M", "N"),
        results,
        product_cost((M, 2 * F, p.K), a.dtype, BF16, **how),
        paired=True,
        consts=consts,
    )


def _results(op: str, results: dict[str, tuple[Tensor | None, DType, tuple]]) -> dict[str, int]:
    """The constants that switch results on and off, by what they are and how they must be."""
    for name, (tensor, dtype, shape) in results.items():
        if tensor is not None:
            expect(op, name.lower(), tensor, dtype, shape)
    return {name: int(tensor is not None) for name, (tensor, *_) in results.items()}


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
    """d_up_gate of d_out, the sum x of all, with the bits of `adapted` and `swiglu.backward`
    behind it. gelu: of GeGLU.

    Args (N is F, of codes b E4M3; M a multiple of 16, F of 64):
        d_up_gate  out    BF16  (M,2F)  [d_up | d_gate]; may be up_gate; None with fp8
        b          in           (K,F)   codes (F,K): they are transposed
        up_gate    in     BF16  (M,2F)
        tail       in     BF16  (R,F)   or None, with h
        abs_max    inout  F32   (1,)    or None; raised to the largest |d_up_gate|
        fp8        out          (M,2F)  or None; d_up_gate in FP8
        out        out    BF16  (M,F)   or None; what forward has written
        out_fp8    out          (M,F)   or None, if out is; on Hopper that in E4M3, transposed

    Cost:    2*M*F*(K+R) FLOPs; one launch.
    """
    op = "matmul_swiglu_backward"
    p = _Product.of(op, a, b, h, tail, scale_a, scale_b, transposed=True, alpha=alpha)
    M, F = p.M, p.N
    if M % MULTIPLE or F % GRADIENT_COLUMNS:
        sizes = f"{MULTIPLE} and {GRADIENT_COLUMNS}, got {M} and {F}"
        raise ValueError(f"{op}: M and F must be multiples of {sizes}")
    expect(op, "up_gate", up_gate, BF16, (M, 2 * F))
    if d_up_gate is None and fp8 is None:
        raise TypeError(f"{op}: d_up_gate or fp8 must be given, both are None")
    consts = _results(op, {"D_UP_GATE": (d_up_gate, BF16, (M, 2 * F))}) | abs_max_consts(abs_max)
    consts |= fp8_consts(op, fp8, M, 2 * F) | again_consts(op, out, out_fp8) | {"GELU": int(gelu)}
    written, again = (abs_max, *fp8_args(fp8)), again_args(out, out_fp8)
    # A square b counts as transposed, too: card files have it so.
    how = {"trans_b": b.shape == (F, p.K), "fast": True, "epilogue": "swiglu_backward"}
    how["besides"] = formats((d_up_gate, up_gate, *written, out or again[1]))
    how["transposes"] = consts["CODES"] == consts["TRANSPOSED"] == 1
    p.launch(
        dev,
        op,
        "T*? d_up_gate, const T* up_gate, inout f32*? abs_max, "
        f"{declared_fp8('M', '2*N')}, {declared_again('M', 'N')}",
        (d_up_gate, up_gate, *written, *again),
        product_cost((M, F, p.K), a.dtype, BF16, rank=p.rank, **how),
        beside=BOXES + (2 * consts["TRANSPOSED"] + consts["OUT_TRANSPOSED"]) * TRANSPOSED,
        consts=consts,
    )
