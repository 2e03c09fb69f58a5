"""Matrix products: cuBLASLt on CUDA (llmq/runtime/cublaslt.py), NumPy's BLAS on the host.

On GeForce cards of Blackwell FP8 codes may be multiplied as MXFP8 with block scales of 1
(llmq/runtime/product.py), which runs at twice the speed.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, FP8, I8_MAX, U8, DType
from llmq.base.operand import CODES_MULTIPLE, ProductCodes
from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES, expect_multiple, expect_scales
from llmq.runtime.arena import ALIGN
from llmq.runtime.cost import Cost, product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div
from llmq.runtime.product import BLOCK, SCALARS, Product, scales_bytes


def _adding_too(file: str, entry: str, args: str, **rules: str) -> tuple[Kernel, Kernel]:
    """(kernel, kernel for accumulation) with the argument D[*batch,M,N] out before args. The entry
    is the same, but accumulation also reads out, and so needs its own declaration."""
    out = "D[*batch,M,N] out" if "i32 batch" in args else "D[M,N] out"
    return tuple(Kernel(file, entry, f"{a} {out}, {args}", **rules) for a in ("out", "inout"))


MATMUL, MATMUL_ACCUMULATE = _adding_too(
    "product/matmul",
    "matmul",
    "S[*batch,K if trans_a else M,M if trans_a else K] a, "
    "S[*batch,N if trans_b else K,K if trans_b else N] b, D[N]? bias, D[*batch,M,N]? addend, "
    "out u8[bytes] workspace, i64 M, i64 N, i64 K, i32 trans_a, i32 trans_b, i32 accumulate, "
    "f32 alpha, f32 beta, i32 batch",
)
_WHOLE = f"N % {CODES_MULTIPLE}, K % {CODES_MULTIPLE}"
_CODES = "A=e4m3|e4m3_half|e5m2, B=e4m3|e4m3_half|e5m2"
MATMUL_FP8, MATMUL_FP8_ACCUMULATE = _adding_too(
    "product/matmul",
    "matmul_fp8",
    "A[M,K] a, B[N,K] b, f32[1] scale_a, f32[1] scale_b, bf16[N]? bias, f32[1]? factor, "
    "out f32[1]? largest, D[M,N]? addend, out u8[bytes] workspace, i64 M, i64 N, i64 K, "
    "i32 accumulate, i32 fast_accumulation, f32 alpha",
    where=_WHOLE,
    types=f"{_CODES}, D=f32|bf16|e4m3|e4m3_half|e5m2",
)
MXFP8, MXFP8_ACCUMULATE = _adding_too(
    "product/matmul",
    "matmul_mxfp8",
    "A[M,K] a, B[N,K] b, u8[count] scales, f32[8] scalars, bf16[N]? bias, D[M,N]? addend, "
    "out u8[bytes] workspace, i64 M, i64 N, i64 K, i32 accumulate, i32 fast_accumulation",
    where=_WHOLE,
    types=_CODES,
)
BLOCK_SCALES = Kernel(
    "product/matmul.cu",
    "block_scales",
    "out u8[n] scales, out f32[8] scalars, f32[1] scale_a, f32[1] scale_b, f32 alpha, f32 beta, "
    "i64 n",
)
BLOCK_SCALED_GENERATION = 12  # major compute capability of GPUs on which MXFP8 may be faster
SCALES_THREADS = 256
SCALES_SHARE = 2  # block scales take at most 1 / SCALES_SHARE of the workspace


def matmul(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    accumulate: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> None:
    """Row-major out = alpha * op(a) @ op(b) [+ bias] [+ beta * addend | + beta * out], sums in F32.

    Tensors with a leading batch dimension make a batched product. Batched products are BF16,
    without bias or accumulate; on a GPU each matrix has a multiple of 16 bytes.

    Args (contiguous, two dimensions):
        out         out  F32 or BF16 (M,N)   F32 if a, b are F32. With accumulate cuBLASLt rounds a
                                             BF16 product before the addition, so that a sum of
                                             many products should be F32
        a           in   F32 or BF16 (M,K)   (K,M) if trans_a
        b           in   as a        (K,N)   (N,K) if trans_b
        bias        in   as out      (N,)    or None; added to every row; not with accumulate
        addend      in   as out      (M,N)   or None; other memory than out. Added before
                                             the product is rounded
        alpha, beta                          factors of the product and of the addend or out

    Cost:    2*M*N*K FLOPs; one library call with dev.spec.library_workspace bytes of scratch.
    """
    batch, M, N = MATMUL.dims(out=out)
    K = a.shape[-2 if trans_a else -1]
    if len(out.shape) > 2:
        _expect_batch(dev, out, a, b, bias is not None or accumulate)
    _expect_one_addend("matmul", bias, addend, accumulate=accumulate)
    if a.dtype is F32 is not out.dtype:
        raise TypeError(f"matmul: out must be F32 where a is F32, got {out.dtype.label}")
    flags = {"trans_a": trans_a, "trans_b": trans_b, "accumulate": accumulate}
    cost = product_cost(
        (M, N, K), a.dtype, out.dtype, addend=addend is not None, batch=batch, **flags
    )
    # The library chooses its own grid and block.
    with dev.scratch("matmul_workspace", (dev.spec.library_workspace,), U8) as workspace:
        sizes = (M, N, K, *map(int, flags.values()))
        args = (out, a, b, bias, addend, workspace, *sizes, alpha, beta, batch)
        dev.launch(MATMUL_ACCUMULATE if accumulate else MATMUL, 1, 1, args, cost=cost)


def _expect_batch(dev: Device, out: Tensor, a: Tensor, b: Tensor, adds: bool) -> None:
    """Raise TypeError for batched products in F32; ValueError for a bias or accumulate, or on a GPU
    for matrices that are no multiple of 16 bytes. adds: True with a bias or accumulate."""
    if adds:
        raise ValueError("matmul: several products have no bias and no sum")
    for name, x in (("out", out), ("a", a), ("b", b)):
        if x.dtype is not BF16 or len(x.shape) != 3:
            raise TypeError(f"matmul: several products: {name} must be BF16 with 3 dimensions")
        if x.shape[0] > 1:
            each, vector = x.size // x.shape[0], VECTOR_BYTES // BF16.itemsize
            expect_multiple("matmul", dev, f"{name}[i].size", each, vector)


def _expect_one_addend(
    op: str, bias: Tensor | None, addend: Tensor | None = None, *, accumulate: bool
) -> None:
    """Raise ValueError for a bias or an addend beside accumulate."""
    for name, tensor in (("bias", bias), ("addend", addend)):
        if accumulate and tensor is not None:
            raise ValueError(f"{op}: {name} and accumulate exclude each other")


def matmul_fp8(
    dev: Device,
    out: Tensor | ProductCodes,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    accumulate: bool = False,
    fast_accumulation: bool = False,
    alpha: float = 1.0,
) -> None:
    """Row-major out = alpha * (scale_a * a) @ (scale_b * b)^T [+ bias] [+ addend], FP8 codes a, b.

    K is the last dimension of a and b, as tensor cores before Blackwell need for FP8.

    Args (contiguous; N and K multiples of 16):
        out         out  F32 or BF16   (M,N)   F32 with accumulate; or ProductCodes without
                                               accumulate, E4M3 if a and b are
        a           in   E4M3 or E5M2  (M,K)
        b           in   E4M3 or E5M2  (N,K)   not E5M2 if a is
        scale_a     in   F32           (1,)
        scale_b     in   F32           (1,)
        bias        in   BF16          (N,)    or None; added to every row; not with accumulate
        addend      in   as out        (M,N)   or None; as in matmul; not with codes
        accumulate                             out is the addend
        fast_accumulation                      permits sums of 14 significant bits on Ada and
                                               Hopper, where they are faster; without it, partial
                                               sums are added up in F32

    Cost:    2*M*N*K FLOPs; one library call with dev.spec.library_workspace bytes of scratch;
             block scales take a byte for 32 codes of the scratch, and a launch.
    """
    op, factor, largest = "matmul_fp8", None, None
    allowed: tuple[DType, ...] = (F32,) if accumulate else (F32, BF16)
    if isinstance(out, ProductCodes):
        out, factor, largest = out.codes, out.factor, out.largest
        allowed = () if accumulate or addend else (E4M3,) if a.dtype is b.dtype else (E4M3, E5M2)
    if out.dtype not in allowed:
        labels = " or ".join(dtype.label for dtype in allowed) or "no codes where they are added"
        raise TypeError(f"{op}: out must be {labels}, got {out.dtype.label}")
    M, K, N = MATMUL_FP8.dims(a=a, b=b)
    expect_scales(op, a, b, scale_a, scale_b)
    _expect_one_addend(op, bias, addend, accumulate=accumulate)
    operands = (out, a, b, scale_a, scale_b, bias, addend)
    sizes = (M, N, K, int(accumulate), int(fast_accumulation))
    with dev.scratch("matmul_workspace", (dev.spec.library_workspace,), U8) as workspace:
        kernel = MATMUL_FP8_ACCUMULATE if accumulate else MATMUL_FP8
        args = (*operands[:-1], factor, largest, addend, workspace, *sizes, alpha)
        per_tensor = partial(dev.launch, kernel, 1, 1, args, cost=_fp8_cost(operands, sizes))
        if out.dtype not in FP8 and _may_be_block_scaled(dev, a, b):
            _choose(dev, per_tensor, operands, workspace, sizes, alpha)
        else:
            per_tensor()


def _choose(
    dev: Device,
    per_tensor: Callable[[], None],
    operands: tuple,
    workspace: Tensor,
    sizes: tuple,
    alpha: float,
) -> None:
    """Launch the faster of two kernels. operands, sizes, alpha: see _block_scaled."""
    out, a, b, _, _, bias, addend = operands
    *matrices, accumulate, fast = sizes
    types = (False, True, a.dtype, b.dtype, out.dtype)
    flags = (bias is not None, bool(accumulate), workspace.nbytes, bool(fast), addend is not None)
    block_scaled = partial(_block_scaled, dev, operands, workspace, sizes, alpha)
    ways = {"per-tensor": per_tensor, "block-scaled": block_scaled}
    work = _work(*matrices, *types, *flags)
    dev.choose(work, ways, kept=(out,) if accumulate else ())


@cache  # launches repeat the same few products
def _work(*product: Any) -> str:
    """Key of the choice of a product's kernel. product: arguments of Product."""
    return f"matmul_fp8 {Product(*product)}"


def _fp8_cost(operands: tuple, sizes: tuple) -> Cost:
    """Cost of either kernel. operands, sizes: see _block_scaled."""
    out, a, *_, addend = operands
    *matrices, accumulate, fast = sizes
    flags = {"accumulate": bool(accumulate), "fast": bool(fast), "addend": addend is not None}
    return product_cost(tuple(matrices), a.dtype, out.dtype, **flags)


def _may_be_block_scaled(dev: Device, a: Tensor, b: Tensor) -> bool:
    """True if MXFP8 may be faster on this device, and the workspace has room for block scales."""
    if dev.spec.capability // 10 != BLOCK_SCALED_GENERATION or a.shape[1] % BLOCK:
        return False
    return SCALES_SHARE * _block_scales_bytes(a, b) <= dev.spec.library_workspace


def _block_scales_bytes(a: Tensor, b: Tensor) -> int:
    """Number of bytes of block scales. All scales are 1, and both operands read the same bytes."""
    return scales_bytes(max(a.shape[0], b.shape[0]), a.shape[1])


def _block_scaled(
    dev: Device, operands: tuple, workspace: Tensor, sizes: tuple, alpha: float
) -> None:
    """MXFP8 product with block scales of 1; alpha * scale_a * scale_b is the library's factor.
    operands: out, a, b, scale_a, scale_b, bias, addend. sizes: last arguments of MXFP8."""
    out, a, b, scale_a, scale_b, bias, addend = operands
    *_, accumulate, _ = sizes
    count = _block_scales_bytes(a, b)  # a multiple of ALIGN
    scales = workspace.rows(0, count)
    scalars = Tensor("scalars", (SCALARS,), F32, workspace.storage, workspace.offset + count)
    rest = workspace.rows(count + ALIGN, workspace.nbytes)
    beta = 1.0 if accumulate or addend is not None else 0.0
    dev.launch(
        BLOCK_SCALES,
        ceil_div(count, 16 * SCALES_THREADS),
        SCALES_THREADS,
        (scales, scalars, scale_a, scale_b, alpha, beta, count),
    )
    dev.launch(
        MXFP8_ACCUMULATE if accumulate else MXFP8,
        1,
        1,
        (out, a, b, scales, scalars, bias, addend, rest, *sizes),
        cost=_fp8_cost(operands, sizes),
    )


# -- Product of int8 codes, exact sums in I32, with a scale for each row of both matrices

MOST_TERMS = (2**31 - 1) // I8_MAX**2  # largest K without overflow
WARP_M, STEP = 64, 64  # rows of a warp, bytes of a step in cu/product/matmul.cu

MATMUL_INT8, MATMUL_INT8_ACCUMULATE = _adding_too(
    "product/matmul.cu",
    "matmul_int8",
    "i8[M,K] a, i8[N,K] b, f32[M] scale_a, f32[N] scale_b, D[N]? bias, "
    "i64 M, i64 N, i64 K, f32 alpha",
    where=f"{_WHOLE}, K <= {MOST_TERMS}",
)


class Int8Tiles(NamedTuple):
    """Tile of a thread block: warps_m x warps_n warps compute WARP_M rows and warp_n columns each.
    stages: steps of K in shared memory."""

    warps_m: int
    warps_n: int
    warp_n: int
    stages: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of a thread block's tile."""
        return WARP_M * self.warps_m, self.warp_n * self.warps_n

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a thread block."""
        return self.stages * sum(self.shape) * STEP

    @property
    def consts(self) -> dict[str, int]:
        """The tiles as the kernel's compile-time constants."""
        return {name.upper(): value for name, value in self._asdict().items()}

    def count(self, M: int, N: int) -> int:
        """Number of thread blocks of a product (M, N)."""
        rows, columns = self.shape
        return ceil_div(M, rows) * ceil_div(N, columns)


# From the fewest bytes read to the most blocks.
INT8_TILES = (Int8Tiles(4, 2, 64, 3), Int8Tiles(2, 4, 32, 4), Int8Tiles(1, 4, 16, 4))


def tiles_of(M: int, N: int, num_sms: int) -> Int8Tiles:
    """The largest tiles that give every multiprocessor a block, else the smallest tiles."""
    for tiles in INT8_TILES:
        if tiles.count(M, N) >= num_sms:
            return tiles
    return INT8_TILES[-1]


def matmul_int8(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    alpha: float = 1.0,
) -> None:
    """Row-major out = (alpha * scale_a * a) @ (scale_b * b)^T [+ bias | + out] of codes a and b.

    Args (contiguous; N and K multiples of 16, K at most MOST_TERMS):
        out      out  F32 or BF16  (M,N)   F32 with accumulate
        a        in   I8           (M,K)
        b        in   I8           (N,K)
        scale_a  in   F32          (M,)
        scale_b  in   F32          (N,)
        bias     in   like out     (N,)    or None; added to every row; not with accumulate

    Cost:    2*M*N*K operations; one launch.
    """
    if accumulate and out.dtype is not F32:
        raise TypeError(f"matmul_int8: out must be F32 with accumulate, got {out.dtype.label}")
    _expect_one_addend("matmul_int8", bias, accumulate=accumulate)
    M, K, N = MATMUL_INT8.dims(a=a, b=b)
    tiles = tiles_of(M, N, dev.spec.num_sms)
    dev.launch(
        MATMUL_INT8_ACCUMULATE if accumulate else MATMUL_INT8,
        tiles.count(M, N),
        32 * tiles.warps_m * tiles.warps_n,
        (out, a, b, scale_a, scale_b, bias, M, N, K, alpha),
        consts={**tiles.consts, "BIAS": int(bias is not None), "ACCUMULATE": int(accumulate)},
        smem=tiles.shared_bytes,
        cost=product_cost((M, N, K), a.dtype, out.dtype, accumulate=accumulate),
    )
