"""The product of queries, keys and values for Hopper, with RoPE behind it: one launch.

What the product leaves in registers is rounded as it would be kept, and its pairs are turned there,
while another tile is multiplied: no kernel reads it again. The adapters beside the matrix are in
the product as in `llmq.ops.matmul_adapted`.
"""

from __future__ import annotations

from llmq.base.dtypes import BF16, E4M3, F32, I32, DType
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    CAPABILITY,
    expect_adapters,
    expect_left,
    expect_qkv,
    own_product_blocks,
    own_product_idle,
    rank_consts,
    runs_own_products,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

OP = "matmul_rope"
THREADS = 384
TILE = (256, 96)  # rows and pairs of columns, of a cluster of two blocks
SHARED = 4 * 40960 + 8 * 7552 + 18 * 8 + 1024  # stages, what 8 warps have, barriers, alignment
HEAD_DIMS = (64, 128, 256)

MIN_ROWS = 2048
# Of what the clusters could multiply in their turns some is no result, and costs the more the
# longer K is; what is saved, a reading and a writing of the result, does not depend on K. By their
# rates both are the same where that part, times the bytes of a row of a, is about 800.
MOST_IDLE = 400

MATMUL_ROPE = Kernel(
    "matmul_rope.cu",
    "matmul_rope",
    args="bf16* qkv, const A[128]* a, const A[32]* b, const bf16[128]*? h, const bf16[32]*? tail, "
    "const f32*? scale_a, const f32*? scale_b, const bf16*? bias, const f32* table, "
    "const i32*? starts, i32 M, i32 N, i32 K, i32 seq_length, i32 num_heads, i32 num_kv_heads",
    capability=CAPABILITY,
)


def takes_heads(head_dim: int, num_kv_heads: int) -> bool:
    """Whether every tile does with the angles of one part of a head, 32 pairs: it has such parts of
    three heads, so that two value heads must be between queries or keys of one part and of the
    next one."""
    return head_dim in HEAD_DIMS and (head_dim == HEAD_DIMS[0] or num_kv_heads > 1)


def serves(
    dev: Device,
    dtype: DType,
    sizes: tuple[int, int, int],
    head_dim: int,
    num_kv_heads: int,
    rank: int = 0,
) -> bool:
    """Whether this is the way to compute qkv (M, N) of a (M, K) on a device.

    dtype: of a. sizes: M, N, K. rank: of the adapters, as h has it; 0: none. Fp8 codes may be given
    to it only where their products may sum with fewer bits.
    """
    if dtype not in (BF16, E4M3) or not takes_heads(head_dim, num_kv_heads):
        return False
    M, N, K = sizes
    row = dtype.itemsize * K
    return (
        M >= MIN_ROWS
        and own_product_idle(dev, M, N // 2, TILE) * row <= MOST_IDLE
        and runs_own_products(dev, CAPABILITY, (row, 2 * rank), rank)
    )


def matmul_rope(
    dev: Device,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    h: Tensor | None,
    tail: Tensor | None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None,
    table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    starts: Tensor | None = None,
) -> None:
    """qkv = scale_a * scale_b * (a @ b^T) + h @ tail^T + bias, its query and key heads turned.

    The bits are those of `matmul_adapted` (fp8: with fast accumulation), which rounds qkv, and of
    `rope.forward`, which reads and writes that. M = B*T, N = (Hq+2Hkv)*Hd.

    Args (contiguous; rows of a, b, h and tail multiples of 16 bytes):
        qkv         out  BF16          (B,T,Hq+2Hkv,Hd)  Hd 64, 128 or 256; Hkv > 1, or Hd 64
        a           in   BF16 or E4M3  (M,K)
        b           in   as a          (N,K)
        h           in   BF16          (M,R)             R at most MAX_RANK; or None
        tail        in   BF16          (N,R)             or None, with h
        scale_a     in   F32           (1,)              of fp8 codes, else None
        scale_b     in   F32           (1,)
        bias        in   BF16          (N,)              or None
        table       in   F32           (P,Hd/2,2)        rope.make_table; P >= T
        starts      in   I32           (B,T)             as in rope.forward; or None

    Cost:    2*M*N*(K+R) FLOPs; one launch. Needs compute capability 9.0.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    B, T, head_dim = expect_qkv(OP, "qkv", qkv, num_heads, num_kv_heads)
    _check(qkv, num_kv_heads, a, b, scale_a, scale_b, bias)
    M, N, K = B * T, qkv.size // (B * T), a.shape[1]
    if not table.shape or table.shape[0] < T:
        raise ValueError(f"{OP}: table must have at least {T} rows, got {table.shape}")
    expect(OP, "table", table, F32, (table.shape[0], head_dim // 2, 2))
    if starts is not None:
        expect(OP, "starts", starts, I32, (B, T))
    R = expect_adapters(OP, h, tail, M, N, transposed=False)
    operands, sizes = (a, b, h, tail, scale_a, scale_b, bias), (M, N, K)
    dev.launch(
        MATMUL_ROPE,
        own_product_blocks(dev, M, N // 2, TILE),
        THREADS,
        (qkv, *operands, table, starts, *sizes, T, num_heads, num_kv_heads),
        consts={
            "HEAD_DIM": head_dim,
            "BIAS": int(bias is not None),
            "DOCUMENTS": int(starts is not None),
        }
        | rank_consts(R),
        smem=SHARED,
        flops=2 * M * N * (K + R),
    )


def _check(
    qkv: Tensor,
    num_kv_heads: int,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Shapes and dtypes, as matmul_rope's; qkv has 4 dimensions."""
    B, T, heads, head_dim = qkv.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{OP}: the head size must be 64, 128 or 256, got {head_dim}")
    if not takes_heads(head_dim, num_kv_heads):
        raise ValueError(f"{OP}: of heads of {head_dim} there must be more than one for keys")
    expect(OP, "qkv", qkv, BF16, qkv.shape)
    if len(a.shape) != 2 or a.shape[0] != B * T:
        raise ValueError(f"{OP}: a must have shape ({B * T}, K), got {a.shape}")
    expect_left(OP, a, scale_a, scale_b)
    expect(OP, "b", b, a.dtype, (heads * head_dim, a.shape[1]))
    if bias is not None:
        expect(OP, "bias", bias, BF16, (heads * head_dim,))
