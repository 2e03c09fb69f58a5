"""RMSNorm of queries and keys, in place in the packed QKV activation. A row is the channels of one
head or, if wide, all query channels or all key channels of a token."""

from contextlib import nullcontext
from typing import NamedTuple

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    BACKWARD_WARPS,
    FORWARD_WARPS,
    MAX_COLUMNS,
    RowLayout,
    finish_column_sum,
    row_layout,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

HEAD_DIM_MULTIPLE = 8  # channels of a lane; a lane has twice as many if Hd > HALF_MAX
HALF_MAX, MAX_HEAD_DIM = 256, 512  # channels of a head that a warp holds


def _declared(wide: bool) -> tuple[Kernel, Kernel]:
    """Forward and backward kernels. wide: True for wide rows, False if rows are heads."""
    qkv = "T[batch,seq_len,num_heads + 2*num_kv_heads,Hd]"
    raw = "T[batch,seq_len,num_heads + num_kv_heads,Hd]"
    queries, keys, rows = "Hd", "Hd", "num_heads + num_kv_heads"
    gpu = f"Hd % ({HEAD_DIM_MULTIPLE} * (1 + (Hd > {HALF_MAX}))), Hd <= {MAX_HEAD_DIM}"
    if wide:
        queries, keys, rows = "num_heads*Hd", "num_kv_heads*Hd", "2"
        gpu = ", ".join(f"{row} % 8, {row} <= {MAX_COLUMNS}" for row in (queries, keys))
    rstd, weights = f"f32[batch,seq_len,{rows}] rstd", f"T[{queries}] q_weight, T[{keys}] k_weight"
    sizes = "i64 tokens, i32 num_heads, i32 num_kv_heads, i32 query_blocks"
    return (
        Kernel(
            "attention/qk_norm.cu",
            "qk_norm_forward",
            f"inout {qkv} qkv, out {raw} raw, out {rstd}, {weights}, f32 eps, {sizes}",
            gpu=gpu,
            programmatic=True,
        ),
        Kernel(
            "attention/qk_norm.cu",
            "qk_norm_backward",
            f"inout {qkv} d_qkv, out f32[q_blocks,{queries}]? q_partial, "
            f"out f32[k_blocks,{keys}]? k_partial, {raw} raw, {rstd}, {weights}, {sizes}",
            gpu=gpu,
        ),
    )


QK_NORM_FORWARD, QK_NORM_BACKWARD = _declared(wide=False)
WIDE_FORWARD, WIDE_BACKWARD = _declared(wide=True)

THREADS = 256
HEADS_PER_LANE = 4  # heads that a thread loads at once; half as many if Hd > HALF_MAX
LANE_VECTORS = 4  # 16-byte vectors of a wide row that a lane holds, as in norm.py


class Passes(NamedTuple):
    """Most thread blocks per multiprocessor, for rows that are heads and for wide rows, and warps
    of a block for wide rows."""

    blocks: int
    wide_blocks: int
    wide_warps: int


FORWARD, BACKWARD = Passes(32, 64, FORWARD_WARPS), Passes(8, 2, BACKWARD_WARPS)


def group_size(head_dim: int) -> int:
    """Number of lanes that share a head: a power of two, so that shuffles stay within the group."""
    return 1 << (head_dim // (HEAD_DIM_MULTIPLE << (head_dim > HALF_MAX)) - 1).bit_length()


def grid(
    tokens: int, num_heads: int, num_kv_heads: int, group: int, max_blocks: int
) -> tuple[int, int]:
    """(blocks that loop over query heads, blocks that loop over key heads). group: see group_size.
    max_blocks: most blocks, divided in proportion to the numbers of heads."""
    # On the CPU a head may need more lanes than a block has.
    step = max(THREADS // group, 1) * HEADS_PER_LANE
    key_blocks = max(1, max_blocks * num_kv_heads // (num_heads + num_kv_heads))
    return (
        min(ceil_div(tokens * num_heads, step), max_blocks - key_blocks),
        min(ceil_div(tokens * num_kv_heads, step), key_blocks),
    )


def wide_grid(
    layout: RowLayout, tokens: int, heads: tuple[int, int], block_warps: int, max_blocks: int
) -> tuple[int, int, int]:
    """(blocks that loop over queries, blocks that loop over keys, threads of a block). heads:
    numbers of query and key heads. max_blocks: divided in proportion to heads; each part has at
    least one block."""
    key_blocks = max(1, max_blocks * heads[1] // sum(heads))
    queries, threads = layout.launch(tokens, block_warps, max(1, max_blocks - key_blocks))
    keys, _ = layout.launch(tokens, block_warps, key_blocks)
    return queries, keys, threads


class _Grid(NamedTuple):
    """Blocks, threads and compile-time constants of a launch."""

    query_blocks: int
    key_blocks: int
    threads: int
    consts: dict[str, int]

    def launch(self, dev: Device, kernel: Kernel, args: tuple, *, writes_sums: bool = True) -> None:
        """Launch the kernel. args: all arguments but the last one, query_blocks."""
        blocks = self.query_blocks + self.key_blocks
        args, consts = (*args, self.query_blocks), self.consts | {"SUMS": int(writes_sums)}
        dev.launch(kernel, blocks, self.threads, args, consts=consts)


def _grid(
    dev: Device,
    qkv: Tensor,
    heads: tuple[int, int],
    wide: bool,
    offset: bool,
    passes: Passes,
    once: bool = False,
) -> _Grid:
    B, T, _, head_dim = qkv.shape
    consts = {"HEAD_DIM": head_dim, "WIDE": int(wide), "OFFSET": int(offset)}
    consts["ROUNDED_ONCE"] = int(once or offset)
    if wide:
        layout = row_layout(max(heads) * head_dim, qkv.dtype.itemsize, LANE_VECTORS)
        max_blocks = passes.wide_blocks * dev.num_sms
        grids = wide_grid(layout, B * T, heads, passes.wide_warps, max_blocks)
        return _Grid(*grids, consts | layout.consts)
    group = group_size(head_dim)
    queries, keys = grid(B * T, *heads, group, passes.blocks * dev.num_sms)
    consts |= {"GROUP": group, "HEADS_PER_LANE": HEADS_PER_LANE >> (head_dim > HALF_MAX)}
    return _Grid(queries, keys, THREADS, consts)


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
    once: bool = False,
) -> None:
    """Copy the query and key heads to raw, then normalize them in qkv.

        row = T(T(rstd * row) * weight)        rstd = 1 / sqrt(mean(row^2) + eps)
        wide: row = T(rstd * row * weight), as HF's Olmo2 rounds
        offset: row = T(rstd * row * (1 + weight)), as HF's Gemma3 does
        once: row = T(rstd * row * weight), as HF's Gemma4 does

    A row is a head or, if wide, all query channels or all key channels of a token. Value heads stay
    as they are. raw: query and key heads before the norm, for backward.
    """
    kernel = WIDE_FORWARD if wide else QK_NORM_FORWARD
    batch, seq_len, _ = kernel.dims(qkv=qkv)
    heads = (num_heads, num_kv_heads)
    args = (qkv, raw, rstd, q_weight, k_weight, eps, batch * seq_len, *heads)
    _grid(dev, qkv, heads, wide, offset, FORWARD, once).launch(dev, kernel, args)


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
    """Turn gradients of normalized heads into gradients of raw heads, in place.

        d_row = T(rstd * (d_row * weight - x_hat * mean(d_row * weight * x_hat)))
        d_weight = or += sum over rows of d_row * x_hat        x_hat = rstd * raw
        offset: 1 + weight in place of weight

    raw, rstd: the results of forward. Without key heads d_k_weight must be None.

    Cost:    two reads and one write of the query and key heads; one launch, and one for each
             weight's gradient, with F32 (blocks, width of a row) of workspace.
    """
    kernel = WIDE_BACKWARD if wide else QK_NORM_BACKWARD
    batch, seq_len, _ = kernel.dims(d_qkv=d_qkv)
    heads = (num_heads, num_kv_heads)
    grid = _grid(dev, d_qkv, heads, wide, offset, BACKWARD)
    rest = (raw, rstd, q_weight, k_weight, batch * seq_len, *heads)
    if d_q_weight is None and d_k_weight is None:
        grid.launch(dev, kernel, (d_qkv, None, None, *rest), writes_sums=False)
        return
    of_keys = (grid.key_blocks, k_weight.size)
    with (
        dev.scratch("q_norm_partial", (grid.query_blocks, q_weight.size), F32) as q_partial,
        dev.scratch("k_norm_partial", of_keys, F32) if num_kv_heads else nullcontext() as k_partial,
    ):
        grid.launch(dev, kernel, (d_qkv, q_partial, k_partial, *rest))
        for target, partial in ((d_q_weight, q_partial), (d_k_weight, k_partial)):
            finish_column_sum(dev, target, partial)
