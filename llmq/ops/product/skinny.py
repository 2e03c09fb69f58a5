"""Products of few rows, which take the time of reading the weight. Each weight is read once."""

from __future__ import annotations

from typing import Any, NamedTuple

from llmq.base.dtypes import BF16
from llmq.base.operand import Bytes, Coded, Mxfp4, Nf4
from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES, WARP
from llmq.runtime.cost import Cost, product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

MOST_ROWS = 16  # most rows of a
MOST_CODED_ROWS = 64  # rows of a for which a block decodes once, at most
WARPS = 8  # warps of a block, each of which sums a part of K
TILE = 8  # rows of b in a tile
RESIDENT = {1: 4, 2: 3}  # blocks per multiprocessor, by the number of tiles in a block
CODED_FEATURES = 2 * TILE  # rows of codes that are the left operand of tensor cores, see SPREAD

SKINNY = Kernel(
    "product/skinny.cu",
    "skinny",
    "out D[M,N] out, bf16[M,K] a, bf16[N,K] b, D[N]? bias, D[M,N]? addend, i32 M, i32 N, i32 K, "
    "f32 alpha",
    where=f"M <= {MOST_ROWS}",
    gpu=f"K % {VECTOR_BYTES // BF16.itemsize}",
    programmatic=True,
)
NF4 = Kernel(
    "product/skinny.cu",
    "skinny_nf4",
    "inout D[M,N] out, bf16[M,K] a, u8[E*rows*K//2] codes, u8[E*rows*K//64] scale_codes, "
    "f32[count] groups, f32[modules] mean, f32[256] levels, D[E*N]? bias, D[M,N]? addend, "
    "i32[E + 1]? starts, i32 M, i32 N, i32 K, i32 E, i32 first, i32 rows, i32 modules, f32 alpha",
    where="K % 64, E*rows % modules, first >= 0, first + rows <= N",
    programmatic=True,
)
MXFP4 = Kernel(
    "product/skinny.cu",
    "skinny_mxfp4",
    "out D[M,N] out, bf16[M,K] a, u8[E*N*K//2] codes, u8[E*N*K//32] exponents, D[E*N]? bias, "
    "D[M,N]? addend, i32[E + 1]? starts, i32 M, i32 N, i32 K, i32 E, f32 alpha",
    where="K % 32",
    programmatic=True,
)
BYTES = Kernel(
    "product/skinny.cu",
    "skinny_bytes",
    "inout D[M,N] out, bf16[M,K] a, Q[E*rows*K] codes, "
    "f32[E*rows//of_module*((of_module+of_scale-1)//of_scale)*columns] scales, D[E*N]? bias, "
    "D[M,N]? addend, i32[E + 1]? starts, i32 M, i32 N, i32 K, i32 E, i32 first, i32 rows, "
    "i32 of_module, i32 of_scale, i32 columns, f32 alpha",
    where="K % 16, E*rows % of_module, first >= 0, first + rows <= N, of_scale >= 1",
    types="Q=e4m3|i8",
    programmatic=True,
)


def takes(dev: Device, a: Tensor, b: Tensor) -> bool:
    """True if `skinny` is the kernel for a product of these tensors on the device."""
    few = a.shape[0] <= MOST_ROWS and dev.spec.capability > 0
    aligned = a.shape[1] * a.dtype.itemsize % VECTOR_BYTES == 0
    return few and aligned and a.dtype is b.dtype is BF16


def skinny(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    alpha: float = 1.0,
) -> None:
    """out (M,N) = alpha * a @ b^T [+ bias] [+ addend], summed in F32 and rounded once.

    A row's bits do not depend on other rows, nor on the number of rows.

    Args (contiguous; K a multiple of 8):
        out     out  F32 or BF16  (M,N)   M at most MOST_ROWS
        a       in   BF16         (M,K)
        b       in   BF16         (N,K)
        bias    in   as out       (N,)    or None; added to every row
        addend  in   as out       (M,N)   or None

    Cost:    b read once; one launch.
    """
    M, K, N = SKINNY.dims(a=a, b=b)
    tiles = 1 if ceil_div(N, TILE) <= RESIDENT[1] * dev.spec.num_sms else 2
    dev.launch(
        SKINNY,
        min(ceil_div(N, tiles * TILE), RESIDENT[tiles] * dev.spec.num_sms),
        WARP * WARPS,
        (out, a, b, bias, addend, M, N, K, alpha),
        consts={"TILES": tiles},
        cost=product_cost(
            (M, N, K), BF16, out.dtype, trans_b=True, addend=addend is not None, epilogue="skinny"
        ),
    )


class Block(NamedTuple):
    """Sizes of a thread block for products with codes. tiles: tiles of a's rows, for which a block
    decodes once. spread: groups of CODED_FEATURES rows of b, for which a block reads a once."""

    tiles: int
    spread: int

    @classmethod
    def of(cls, dev: Device, M: int, rows: int, E: int) -> Block:
        """Return the block for M rows of a, which E matrices of `rows` rows share about equally."""
        each = min(ceil_div(M, E) * (1 if E == 1 else 2), MOST_CODED_ROWS)
        tiles = 1 << (ceil_div(each, TILE) - 1).bit_length()
        blocks = E * ceil_div(rows, 2 * CODED_FEATURES)
        # With a wider spread, blocks read a less often, and fewer sums wait.
        few = dev.spec.num_sms * (3 if tiles > 2 else 4) // 4
        return cls(tiles, 2 if blocks >= few else 1)

    @property
    def features(self) -> int:
        return CODED_FEATURES * self.spread

    @property
    def shared(self) -> int:
        """Bytes of shared memory, which holds codes of all threads' stages, or sums of all
        warps."""
        stages = 4 if self.spread == 1 else 2
        sums = WARPS * TILE * self.tiles * (CODED_FEATURES + 1) * 4
        return max(stages * 2 * self.spread * WARP * WARPS * VECTOR_BYTES, sums)

    @property
    def consts(self) -> dict[str, int]:
        return {"TILES": self.tiles, "SPREAD": self.spread}


def skinny_nf4(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Nf4,
    starts: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    alpha: float = 1.0,
) -> None:
    """`skinny` for any number of rows, and a matrix b (N,K) of NF4 codes. Codes are decoded as by
    four_bits.decode, rounded to BF16. K: a multiple of 64.

    b: may also be E matrices (E,N,K) of one run. Then bias is (E,N), and starts, I32 (E + 1,),
    ascends from 0 to M: matrix e multiplies rows [starts[e], starts[e + 1]) of a.

    Cost:    codes and scales of matrices that have rows, read once for each 64 rows; a launch for
             each of b's runs.
    """
    *experts, N, K = b.shape
    (M, _), E = a.shape, experts[0] if experts else 1
    for run in b.runs:
        coded = (run.codes, run.scale_codes, run.groups, run.mean, b.levels)
        added = (bias and bias.view(E * N), addend, starts)
        rows = run.rows // E
        block = Block.of(dev, M, rows, E)
        dev.launch(
            NF4,
            (ceil_div(rows, block.features), E),
            WARP * WARPS,
            (out, a, *coded, *added, M, N, K, E, run.first, rows, run.mean.size, alpha),
            smem=block.shared,
            consts=block.consts,
            cost=Cost(flops=2 * M * rows * K),
        )


def skinny_mxfp4(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Mxfp4,
    starts: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    alpha: float = 1.0,
) -> None:
    """`skinny_nf4` for MXFP4 codes, whose values are exact in BF16. K: a multiple of 32.

    Cost:    codes of matrices that have rows, read once for each 64 rows; one launch.
    """
    *experts, N, K = b.shape
    (M, _), E = a.shape, experts[0] if experts else 1
    added = (bias and bias.view(E * N), addend, starts)
    block = Block.of(dev, M, N, E)
    dev.launch(
        MXFP4,
        (ceil_div(N, block.features), E),
        WARP * WARPS,
        (out, a, b.codes, b.exponents, *added, M, N, K, E, alpha),
        smem=block.shared,
        consts=block.consts,
        cost=Cost(flops=2 * M * N * K),
    )


def skinny_bytes(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Bytes,
    starts: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    alpha: float = 1.0,
) -> None:
    """`skinny_nf4` for codes of one byte, which are multiplied exactly. Scales multiply the sums.
    K: a multiple of 16.

    Cost:    codes of matrices that have rows, read once for each 64 rows; a launch for each of b's
             runs.
    """
    *experts, N, K = b.shape
    (M, _), E = a.shape, experts[0] if experts else 1
    for run in b.runs:
        added = (bias and bias.view(E * N), addend, starts)
        rows = run.rows // E
        block = Block.of(dev, M, rows, E)
        dev.launch(
            BYTES,
            (ceil_div(rows, block.features), E),
            WARP * WARPS,
            (out, a, run.codes, run.scales, *added, M, N, K, E, run.first, rows, *run[-3:], alpha),
            smem=block.shared,
            consts=block.consts,
            cost=Cost(flops=2 * M * rows * K),
        )


_MULTIPLY = {Nf4: skinny_nf4, Mxfp4: skinny_mxfp4, Bytes: skinny_bytes}


def coded(dev: Device, out: Tensor, a: Tensor, b: Coded, *args: Tensor, **how: Any) -> None:
    """Compute a product with codes b by the kernel of b's format. args, how: arguments of this
    kernel."""
    _MULTIPLY[type(b)](dev, out, a, b, *args, **how)
