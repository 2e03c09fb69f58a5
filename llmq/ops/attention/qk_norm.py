"""RMSNorm of queries and keys, in place in the packed QKV activation.

Normalize the channels of every head, or wide: all query and all key channels of a token.
"""

from typing import NamedTuple

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    BACKWARD_WARPS,
    FORWARD_WARPS,
    RowLayout,
    expect_accumulator,
    expect_columns,
    expect_head_dim,
    expect_qkv,
    finish_column_sum,
    row_layout,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

QK_NORM_FORWARD = Kernel(
    "attention/qk_norm.cu",
    "qk_norm_forward",
    args="inout T* qkv, T* raw, f32* rstd, const T* q_weight, const T* k_weight, f32 eps, "
    "i64 tokens, i32 num_heads, i32 num_kv_heads, i32 query_blocks",
)
QK_NORM_BACKWARD = Kernel(
    "attention/qk_norm.cu",
    "qk_norm_backward",
    args="inout T* d_qkv, f32*? q_partial, f32*? k_partial, const T* raw, const f32* rstd, "
    "const T* q_weight, const T* k_weight, i64 tokens, i32 num_heads, i32 num_kv_heads, "
    "i32 query_blocks",
)

HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 8, 256  # channels of a lane, at most a warp of lanes a head
THREADS = 256
HEADS_PER_LANE = 4  # that a thread has loads in flight for
LANE_VECTORS = 4  # of a wide row, as in norm.py


class Passes(NamedTuple):
    """The differences between the passes: blocks on a multiprocessor, and warps of a wide block."""

    blocks: int
    wide_blocks: int
    wide_warps: int


FORWARD, BACKWARD = Passes(32, 64, FORWARD_WARPS), Passes(8, 2, BACKWARD_WARPS)


def group_size(head_dim: int) -> int:
    """Lanes that share a head, 8 channels each: a power of two, so that shuffles stay inside."""
    return 1 << (head_dim // HEAD_DIM_MULTIPLE - 1).bit_length()


def grid(
    tokens: int, num_heads: int, num_kv_heads: int, group: int, max_blocks: int
) -> tuple[int, int]:
    """Blocks that loop over the query heads and blocks that loop over the key heads. max_blocks, as
    many as run at a time, are divided so that each has as many heads."""
    step = max(THREADS // group, 1) * HEADS_PER_LANE  # heads of the CPU may be wider than a block
    key_blocks = max(1, max_blocks * num_kv_heads // (num_heads + num_kv_heads))
    return (
        min(ceil_div(tokens * num_heads, step), max_blocks - key_blocks),
        min(ceil_div(tokens * num_kv_heads, step), key_blocks),
    )


def wide_grid(
    layout: RowLayout, tokens: int, heads: tuple[int, int], block_warps: int, max_blocks: int
) -> tuple[int, int, int]:
    """Blocks that loop over queries, blocks that loop over keys, and threads of one. max_blocks are
    divided as the channels are; there is at least one of each."""
    key_blocks = max(1, max_blocks * heads[1] // sum(heads))
    queries, threads = layout.launch(tokens, block_warps, max(1, max_blocks - key_blocks))
    keys, _ = layout.launch(tokens, block_warps, key_blocks)
    return queries, keys, threads


class _Launch(NamedTuple):
    """How a kernel is launched."""

    query_blocks: int
    key_blocks: int
    threads: int
    consts: dict[str, int]

    def run(self, dev: Device, kernel: Kernel, args: tuple, *, writes_sums: bool = True) -> None:
        """args: all but query_blocks."""
        blocks = self.query_blocks + self.key_blocks
        args, consts = (*args, self.query_blocks), self.consts | {"SUMS": int(writes_sums)}
        dev.launch(kernel, blocks, self.threads, args, consts=consts)


def _launch(
    dev: Device, qkv: Tensor, heads: tuple[int, int], wide: bool, offset: bool, passes: Passes
) -> _Launch:
    B, T, _, head_dim = qkv.shape
    consts = {"HEAD_DIM": head_dim, "WIDE": int(wide), "OFFSET": int(offset)}
    if wide:
        layout = row_layout(max(heads) * head_dim, qkv.dtype.itemsize, LANE_VECTORS)
        max_blocks = passes.wide_blocks * dev.num_sms
        grids = wide_grid(layout, B * T, heads, passes.wide_warps, max_blocks)
        return _Launch(*grids, consts | layout.consts)
    group = group_size(head_dim)
    queries, keys = grid(B * T, *heads, group, passes.blocks * dev.num_sms)
    consts |= {"GROUP": group, "HEADS_PER_LANE": HEADS_PER_LANE}
    return _Launch(queries, keys, THREADS, consts)


def _check(
    op: str,
    dev: Device,
    name: str,
    qkv: Tensor,
    heads: tuple[int, int],
    raw: Tensor,
    rstd: Tensor,
    weights: tuple[Tensor, Tensor],
    wide: bool,
) -> tuple[int, tuple[int, int]]:
    """Tokens, and the widths of a row of queries and of keys, of tensors that fit."""
    B, T, head_dim = expect_qkv(op, name, qkv, *heads)
    widths = (heads[0] * head_dim, heads[1] * head_dim) if wide else (head_dim, head_dim)
    if not wide:
        expect_head_dim(op, dev, head_dim, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM)
    for width in widths if wide else ():
        expect_columns(op, dev, "channels", width)
    expect(op, "raw", raw, qkv.dtype, (B, T, sum(heads), head_dim))
    expect(op, "rstd", rstd, F32, (B, T, 2 if wide else sum(heads)))
    for weight_name, weight, width in zip(("q_weight", "k_weight"), weights, widths, strict=True):
        expect(op, weight_name, weight, qkv.dtype, (width,))
    return B * T, widths


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
    wide: bool = False,
    offset: bool = False,
) -> None:
    """Keep the query and key heads in raw, then normalise them in qkv.

        row = T(T(rstd * row) * weight)        rstd = 1 / sqrt(mean(row^2) + eps)
        wide: row = T(rstd * row * weight), as HF's Olmo2 rounds
        offset: row = T(rstd * row * (1 + weight)), as HF's Gemma3 does

    A row is a head; wide: all query channels of a token, or all its key channels.

    Args:
        qkv       inout  T   (B,T,Hq+2Hkv,Hd)  F32 or BF16; value heads are not touched
        raw       out    T   (B,T,Hq+Hkv,Hd)   heads before the norm, for the backward pass
        rstd      out    F32 (B,T,Hq+Hkv)      wide: (B,T,2), of queries, of keys
        q_weight  in     T   (Hd,)             Hd a multiple of 8 up to 256 (on a GPU)
                                               wide: (Hq*Hd,), a multiple of 8, at most 8192
        k_weight  in     T   (Hd,)             wide: (Hkv*Hd,), the same
    """
    op = "qk_norm.forward"
    heads, weights = (num_heads, num_kv_heads), (q_weight, k_weight)
    tokens, _ = _check(op, dev, "qkv", qkv, heads, raw, rstd, weights, wide)
    launch = _launch(dev, qkv, heads, wide, offset, FORWARD)
    args = (qkv, raw, rstd, q_weight, k_weight, eps, tokens, *heads)
    launch.run(dev, QK_NORM_FORWARD, args)


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
    wide: bool = False,
    offset: bool = False,
) -> None:
    """Turn the gradients of the normalised heads into those of the raw ones, in place.

        d_row = T(rstd * (d_row * weight - x_hat * mean(d_row * weight * x_hat)))
        d_weight = or += sum over rows of d_row * x_hat        x_hat = rstd * raw
        offset: 1 + weight in place of weight

    Args as forward's, and
        d_qkv       inout  T          (B,T,Hq+2Hkv,Hd)  F32 or BF16; value heads are not touched
        d_q_weight  inout  F32, BF16  as q_weight       or None; added to when accumulating
        d_k_weight  inout  F32, BF16  as k_weight       or None; added to when accumulating
        raw, rstd   in                                  as the forward pass kept them

    Cost:    two reads and one write of the query and key heads; one launch, and where a weight's
             gradient is wanted one for each, and workspace F32 (grid, width of a row).
    """
    op = "qk_norm.backward"
    heads, weights = (num_heads, num_kv_heads), (q_weight, k_weight)
    tokens, widths = _check(op, dev, "d_qkv", d_qkv, heads, raw, rstd, weights, wide)
    expect_accumulator(op, "d_q_weight", d_q_weight, q_weight.shape)
    expect_accumulator(op, "d_k_weight", d_k_weight, k_weight.shape)
    launch = _launch(dev, d_qkv, heads, wide, offset, BACKWARD)
    rest = (raw, rstd, q_weight, k_weight, tokens, *heads)
    if d_q_weight is None and d_k_weight is None:
        launch.run(dev, QK_NORM_BACKWARD, (d_qkv, None, None, *rest), writes_sums=False)
        return
    with (
        dev.scratch("q_norm_partial", (launch.query_blocks, widths[0]), F32) as q_partial,
        dev.scratch("k_norm_partial", (launch.key_blocks, widths[1]), F32) as k_partial,
    ):
        launch.run(dev, QK_NORM_BACKWARD, (d_qkv, q_partial, k_partial, *rest))
        for target, partial in ((d_q_weight, q_partial), (d_k_weight, k_partial)):
            finish_column_sum(dev, target, partial)
