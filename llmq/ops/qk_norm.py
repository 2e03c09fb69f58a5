"""RMSNorm over every query and key head, in place in the packed QKV activation."""

from __future__ import annotations

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    expect_accumulator,
    expect_head_dim,
    expect_qkv,
    finish_column_sum,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

QK_NORM_FORWARD = Kernel(
    "qk_norm.cu",
    "qk_norm_forward",
    args="inout T* qkv, T* raw, f32* rstd, const T* q_weight, const T* k_weight, f32 eps, "
    "i64 tokens, i32 num_heads, i32 num_kv_heads, i32 query_blocks",
)
QK_NORM_BACKWARD = Kernel(
    "qk_norm.cu",
    "qk_norm_backward",
    args="inout T* d_qkv, f32* partial, const T* raw, const f32* rstd, const T* q_weight, "
    "const T* k_weight, i64 tokens, i32 num_heads, i32 num_kv_heads, i32 query_blocks",
)

HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 8, 256  # channels of a lane, at most a warp of lanes a head
THREADS = 256
HEADS_PER_LANE = 4  # that a thread has loads in flight for
FORWARD_BLOCKS_PER_SM = 32
BACKWARD_BLOCKS_PER_SM = 8


def group_size(head_dim: int) -> int:
    """Lanes that share a head, 8 channels each: a power of two, so that shuffles stay inside."""
    return 1 << (head_dim // HEAD_DIM_MULTIPLE - 1).bit_length()


def grid(
    tokens: int, num_heads: int, num_kv_heads: int, group: int, max_blocks: int
) -> tuple[int, int]:
    """Blocks that loop over the query heads and blocks that loop over the key heads.

    max_blocks, as many as run at a time, are divided so that each has as many heads.
    """
    step = THREADS // group * HEADS_PER_LANE
    key_blocks = max(1, max_blocks * num_kv_heads // (num_heads + num_kv_heads))
    return (
        min(ceil_div(tokens * num_heads, step), max_blocks - key_blocks),
        min(ceil_div(tokens * num_kv_heads, step), key_blocks),
    )


def _consts(head_dim: int, group: int, offset: bool) -> dict[str, int]:
    """The kernels' compile-time constants."""
    sizes = {"HEAD_DIM": head_dim, "GROUP": group, "HEADS_PER_LANE": HEADS_PER_LANE}
    return sizes | {"OFFSET": int(offset)}


def _check(
    op: str,
    dev: Device,
    name: str,
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    raw: Tensor,
    rstd: Tensor,
    weights: tuple[Tensor, Tensor],
) -> tuple[int, int]:
    """(tokens, Hd) of a packed QKV tensor whose companions fit."""
    B, T, head_dim = expect_qkv(op, name, qkv, num_heads, num_kv_heads)
    heads = num_heads + num_kv_heads
    expect_head_dim(op, dev, head_dim, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM)
    expect(op, "raw", raw, qkv.dtype, (B, T, heads, head_dim))
    expect(op, "rstd", rstd, F32, (B, T, heads))
    for weight_name, weight in zip(("q_weight", "k_weight"), weights, strict=True):
        expect(op, weight_name, weight, qkv.dtype, (head_dim,))
    return B * T, head_dim


def forward(
    dev: Device,
    qkv: Tensor,
    raw: Tensor,
    rstd: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    *,
    offset: bool = False,
) -> None:
    """Keep the query and key heads in raw, then normalise them in qkv.

        head = T(T(rstd * head) * weight)        rstd = 1 / sqrt(mean(head^2) + eps)
        with offset: head = T(rstd * head * (1 + weight)), as HF's Gemma3 rounds

    Args:
        qkv       inout  T   (B,T,Hq+2Hkv,Hd)  F32 or BF16; value heads are not touched
        raw       out    T   (B,T,Hq+Hkv,Hd)   heads before the norm, for the backward pass
        rstd      out    F32 (B,T,Hq+Hkv)
        q_weight  in     T   (Hd,)             Hd a multiple of 8 up to 256 (on a GPU)
        k_weight  in     T   (Hd,)

    Cost:    one read and two writes of the query and key heads; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "qk_norm.forward"
    heads, weights = (num_heads, num_kv_heads), (q_weight, k_weight)
    tokens, head_dim = _check(op, dev, "qkv", qkv, *heads, raw, rstd, weights)
    group = group_size(head_dim)
    max_blocks = FORWARD_BLOCKS_PER_SM * dev.num_sms
    query_blocks, key_blocks = grid(tokens, num_heads, num_kv_heads, group, max_blocks)
    sizes = (tokens, num_heads, num_kv_heads, query_blocks)
    dev.launch(
        QK_NORM_FORWARD,
        query_blocks + key_blocks,
        THREADS,
        (qkv, raw, rstd, q_weight, k_weight, eps, *sizes),
        consts=_consts(head_dim, group, offset),
    )


def backward(
    dev: Device,
    d_qkv: Tensor,
    d_q_weight: Accumulator | None,
    d_k_weight: Accumulator | None,
    raw: Tensor,
    rstd: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    offset: bool = False,
) -> None:
    """Turn the gradients of the normalised heads into those of the raw ones, in place.

        d_head = T(rstd * (d_head * weight - x_hat * mean(d_head * weight * x_hat)))
        d_weight = or += sum over tokens and heads of d_head * x_hat        x_hat = rstd * raw
        with offset: 1 + weight in place of weight

    Args:
        d_qkv       inout  T          (B,T,Hq+2Hkv,Hd)  F32 or BF16; value heads are not touched
        d_q_weight  inout  F32, BF16  (Hd,)             or None; added to when accumulating
        d_k_weight  inout  F32, BF16  (Hd,)             or None; added to when accumulating
        raw         in     T          (B,T,Hq+Hkv,Hd)   as the forward pass kept them
        rstd        in     F32        (B,T,Hq+Hkv)
        q_weight    in     T          (Hd,)             Hd a multiple of 8 up to 256 (on a GPU)
        k_weight    in     T          (Hd,)

    Cost:    two reads and one write of the query and key heads; three launches; workspace F32
             (grid, Hd).
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "qk_norm.backward"
    heads, weights = (num_heads, num_kv_heads), (q_weight, k_weight)
    tokens, head_dim = _check(op, dev, "d_qkv", d_qkv, *heads, raw, rstd, weights)
    expect_accumulator(op, "d_q_weight", d_q_weight, (head_dim,))
    expect_accumulator(op, "d_k_weight", d_k_weight, (head_dim,))
    group = group_size(head_dim)
    max_blocks = BACKWARD_BLOCKS_PER_SM * dev.num_sms
    query_blocks, key_blocks = grid(tokens, num_heads, num_kv_heads, group, max_blocks)
    blocks = query_blocks + key_blocks
    sizes = (tokens, num_heads, num_kv_heads, query_blocks)
    with dev.scratch("qk_norm_partial", (blocks, head_dim), F32) as partial:
        dev.launch(
            QK_NORM_BACKWARD,
            blocks,
            THREADS,
            (d_qkv, partial, raw, rstd, q_weight, k_weight, *sizes),
            consts=_consts(head_dim, group, offset),
        )
        for target, start, stop in (
            (d_q_weight, 0, query_blocks),
            (d_k_weight, query_blocks, blocks),
        ):
            sums = partial.rows(start, stop)
            finish_column_sum(dev, target, sums)
