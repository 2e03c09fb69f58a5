"""RMSNorm over all query and over all key channels, in place in the packed QKV activation."""

from __future__ import annotations

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    BACKWARD_WARPS,
    FORWARD_WARPS,
    MAX_COLUMNS,
    RowLayout,
    expect_accumulator,
    expect_qkv,
    finish_column_sum,
    row_layout,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

WIDE_QK_NORM_FORWARD = Kernel(
    "wide_qk_norm.cu",
    "wide_qk_norm_forward",
    args="inout T* qkv, T* raw, f32* rstd, const T* q_weight, const T* k_weight, f32 eps, "
    "i64 tokens, i32 q_channels, i32 k_channels, i32 query_blocks",
)
WIDE_QK_NORM_BACKWARD = Kernel(
    "wide_qk_norm.cu",
    "wide_qk_norm_backward",
    args="inout T* d_qkv, f32* q_partial, f32* k_partial, const T* raw, const f32* rstd, "
    "const T* q_weight, const T* k_weight, i64 tokens, i32 q_channels, i32 k_channels, "
    "i32 query_blocks",
)

LANE_VECTORS = 4  # as in norm.py
FORWARD_BLOCKS_PER_SM = 64
BACKWARD_BLOCKS_PER_SM = 2


def grid(
    layout: RowLayout, tokens: int, channels: tuple[int, int], block_warps: int, max_blocks: int
) -> tuple[int, int, int]:
    """Blocks that loop over queries, blocks that loop over keys, and threads of one.

    max_blocks are divided as the channels are; there is at least one of each.
    """
    key_blocks = max(1, max_blocks * channels[1] // sum(channels))
    queries, threads = layout.launch(tokens, block_warps, max(1, max_blocks - key_blocks))
    keys, _ = layout.launch(tokens, block_warps, key_blocks)
    return queries, keys, threads


def _check(
    op: str,
    name: str,
    qkv: Tensor,
    heads: tuple[int, int],
    raw: Tensor,
    rstd: Tensor,
    weights: tuple[Tensor, Tensor],
) -> tuple[int, int, int]:
    """(tokens, Cq, Ck) of a packed QKV tensor whose companions fit."""
    B, T, head_dim = expect_qkv(op, name, qkv, *heads)
    channels = (heads[0] * head_dim, heads[1] * head_dim)
    for count in channels:
        if count % 8 or not 0 < count <= MAX_COLUMNS:
            raise ValueError(
                f"{op}: channels must be a positive multiple of 8, at most {MAX_COLUMNS}, "
                f"got {count}"
            )
    expect(op, "raw", raw, qkv.dtype, (B, T, sum(heads), head_dim))
    expect(op, "rstd", rstd, F32, (B, T, 2))
    for weight_name, weight, count in zip(("q_weight", "k_weight"), weights, channels, strict=True):
        expect(op, weight_name, weight, qkv.dtype, (count,))
    return B * T, *channels


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
) -> None:
    """Keep the query and key channels in raw, then normalise them in qkv.

        row = T(rstd * row * weight)        rstd = 1 / sqrt(mean(row^2) + eps)

    A row is all query channels of a token, or all its key channels. Rounds as HF's Olmo2 does.

    Args:
        qkv       inout  T   (B,T,Hq+2Hkv,Hd)  F32 or BF16; value heads are not touched
        raw       out    T   (B,T,Hq+Hkv,Hd)   channels before the norm, for the backward pass
        rstd      out    F32 (B,T,2)           of queries, of keys
        q_weight  in     T   (Hq*Hd,)          a multiple of 8, at most 8192
        k_weight  in     T   (Hkv*Hd,)         the same

    Cost:    one read and two writes of the query and key channels; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    heads, weights = (num_heads, num_kv_heads), (q_weight, k_weight)
    sizes = _check("wide_qk_norm.forward", "qkv", qkv, heads, raw, rstd, weights)
    tokens, *channels = sizes
    layout = row_layout(max(channels), qkv.dtype.itemsize, LANE_VECTORS)
    max_blocks = FORWARD_BLOCKS_PER_SM * dev.num_sms
    queries, keys, threads = grid(layout, tokens, channels, FORWARD_WARPS, max_blocks)
    dev.launch(
        WIDE_QK_NORM_FORWARD,
        queries + keys,
        threads,
        (qkv, raw, rstd, q_weight, k_weight, eps, *sizes, queries),
        consts=layout.consts,
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
) -> None:
    """Turn the gradients of the normalised channels into those of the raw ones, in place.

        d_row = T(rstd * (d_row * weight - x_hat * mean(d_row * weight * x_hat)))
        d_weight = or += sum over tokens of d_row * x_hat        x_hat = rstd * raw

    Args:
        d_qkv       inout  T          (B,T,Hq+2Hkv,Hd)  F32 or BF16; value heads are not touched
        d_q_weight  inout  F32, BF16  (Hq*Hd,)          or None; added to when accumulating
        d_k_weight  inout  F32, BF16  (Hkv*Hd,)         or None; added to when accumulating
        raw         in     T          (B,T,Hq+Hkv,Hd)   as the forward pass kept them
        rstd        in     F32        (B,T,2)
        q_weight    in     T          (Hq*Hd,)          a multiple of 8, at most 8192
        k_weight    in     T          (Hkv*Hd,)         the same

    Cost:    two reads and one write of the query and key channels; three launches; workspace F32
             (grid, Hq*Hd or Hkv*Hd).
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "wide_qk_norm.backward"
    heads, weights = (num_heads, num_kv_heads), (q_weight, k_weight)
    sizes = _check(op, "d_qkv", d_qkv, heads, raw, rstd, weights)
    tokens, *channels = sizes
    expect_accumulator(op, "d_q_weight", d_q_weight, q_weight.shape)
    expect_accumulator(op, "d_k_weight", d_k_weight, k_weight.shape)
    layout = row_layout(max(channels), d_qkv.dtype.itemsize, LANE_VECTORS)
    max_blocks = BACKWARD_BLOCKS_PER_SM * dev.num_sms
    queries, keys, threads = grid(layout, tokens, channels, BACKWARD_WARPS, max_blocks)
    with (
        dev.scratch("q_norm_partial", (queries, channels[0]), F32) as q_partial,
        dev.scratch("k_norm_partial", (keys, channels[1]), F32) as k_partial,
    ):
        dev.launch(
            WIDE_QK_NORM_BACKWARD,
            queries + keys,
            threads,
            (d_qkv, q_partial, k_partial, raw, rstd, q_weight, k_weight, *sizes, queries),
            consts=layout.consts,
        )
        for target, partial in ((d_q_weight, q_partial), (d_k_weight, k_partial)):
            finish_column_sum(dev, target, partial)
