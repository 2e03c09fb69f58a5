"""Attention's backward on Hopper, in warpgroup products (cu/attention/attention_backward.cu)."""

from collections.abc import Callable
from functools import cache, partial
from math import e, log2

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import CAPABILITY
from llmq.runtime.attention_parts import AttentionMask, sees_all_before
from llmq.runtime.cost import BESIDE_ATTENTION, attention_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

LOG2E = log2(e)
ROWS = 64  # rows of a step, and of the part of a tile that one warpgroup computes
THREADS = 384
STATISTICS_THREADS = 256
STATISTICS_LANES = 8  # threads that share a row
STAGES = {64: 6, 128: 3}  # by head size: number of steps in shared memory or on the way there
# Costs are in units of one step of a tile of keys, which has four products; measured on an H200.
OF_QUERIES = 3 / 4  # cost of a step of a tile of queries
ADDED = 4  # cost of writing and reading sums that two blocks share
EVENNESS = 3  # exponent of the power mean of the average and the longest work

STATISTICS = Kernel(
    "attention/attention_backward.cu",
    "attention_statistics",
    "out f32[batch,num_heads,blocks,2,64] statistics, out i32[counts] taken, "
    "bf16[batch,seq_len,num_heads,Hd] d_out, bf16[batch,seq_len,num_heads,Hd] out, "
    "f32[batch,num_heads,seq_len] lse, i32 counts, i32 seq_len, i32 num_heads",
    capability=CAPABILITY,
)
GRADIENT = Kernel(
    "attention/attention_backward.cu",
    "attention_gradient",
    "box16 out bf16[batches*seq_len,columns] d_qkv, "
    "box64 bf16[batches*seq_len,columns // (num_heads + 2*num_kv_heads) * num_heads] d_out, "
    "f32[batches,num_heads,blocks,2,64] statistics, box64 bf16[batches*seq_len,columns] qkv, "
    "inout i32[counts] taken, inout f32[parts,batches,num_kv_heads,blocks,2,64,Hd]? sums, "
    "i32 part_heads, i32 batches, i32 seq_len, i32 num_heads, i32 num_kv_heads, f32 scale, "
    "f32 scale_log2",
    capability=CAPABILITY,
)


def chosen(
    dev: Device, qkv: Tensor, mask: AttentionMask, softcap: int = 0
) -> Callable[..., None] | None:
    """`backward` if it supports the device, dtype, sizes and mask, and softcap is 0; else None.
    qkv: (B,T,Hq+2*Hkv,Hd), the whole micro-batch, so that chunks do not change the order in which
    a sequence's terms are added."""
    batch, seq_len, _, head_dim = qkv.shape
    sees_all = mask.starts is None and sees_all_before(mask.window, seq_len)
    fits = qkv.dtype == BF16 and is_supported(dev.spec.capability, seq_len, head_dim)
    return partial(backward, micro_batch=batch) if fits and sees_all and not softcap else None


def is_supported(capability: int, seq_len: int, head_dim: int) -> bool:
    """True if backward() computes these sequences in BF16. capability: compute capability * 10."""
    return capability == CAPABILITY and head_dim in STAGES and seq_len % ROWS == 0


def shared_bytes(head_dim: int) -> int:
    """Bytes of dynamic shared memory of a thread block of attention_gradient."""
    stages, tile = STAGES[head_dim], ROWS * head_dim * BF16.itemsize
    own, step, statistics = 2 * 4 * tile, 2 * tile, 2 * ROWS * F32.itemsize
    barriers = 8 * (2 * stages + 3 * 2) + 2 * 32  # including the tiles' coordinates
    return own + stages * (step + statistics) + barriers + 1024  # 1024 for alignment to 1024


@cache
def part_heads(batch: int, seq_len: int, num_heads: int, num_kv_heads: int, num_sms: int) -> int:
    """The number of query heads of a key head whose gradients one block sums. The number is less
    than the whole group if the longest tile, at the first keys, would take long beside a
    multiprocessor's average work."""
    group, blocks = num_heads // num_kv_heads, seq_len // ROWS
    tiles = ceil_div(blocks, 2)
    steps = tiles * (blocks - tiles + 1)  # number of steps of all tiles of one query head
    each = (1 + OF_QUERIES) * batch * num_heads * steps / num_sms
    adding = ADDED * max(1, tiles * batch * num_kv_heads / num_sms)

    def time(parts: int) -> float:
        longest = ceil_div(group, parts) * blocks
        return (each**EVENNESS + longest**EVENNESS) ** (1 / EVENNESS) + adding * (parts - 1)

    return ceil_div(group, min(range(1, group + 1), key=time))


def backward(
    dev: Device, tensors: tuple, num_heads: int, num_kv_heads: int, mask: AttentionMask,
    scale: float, *, micro_batch: int,
) -> None:  # fmt: skip
    """Gradient of attention: the `kernel` of ops.attention.attention.backward.

    tensors: d_qkv, d_out, out, lse, qkv, as in attention.backward; (B,T,heads,Hd), lse (B,Hq,T).
    mask: must be causal without window or starts. scale: factor of scores. micro_batch: number of
    sequences in the whole micro-batch; qkv may be a chunk (see `chosen`).

    Cost:    7*B*Hq*T*T*Hd FLOPs; two launches; workspace 8*B*Hq*T bytes, and 8*B*Hkv*T*Hd for each
             part of query heads but the last, see part_heads().
    """
    d_qkv, d_out, out, lse, qkv = tensors
    batch, seq_len, _, head_dim = qkv.shape
    blocks = seq_len // ROWS
    heads = part_heads(micro_batch, seq_len, num_heads, num_kv_heads, dev.num_sms)
    parts = ceil_div(num_heads // num_kv_heads, heads)
    consts = {"HEAD_DIM": head_dim, "STAGES": STAGES[head_dim]}
    tiles = ceil_div(blocks, 2) * batch * (num_heads + parts * num_kv_heads)
    shape = (batch, num_heads, blocks, 2, ROWS)
    of_keys = (parts - 1, batch, num_kv_heads, blocks, 2, ROWS, head_dim)
    flops = 7 * batch * num_heads * seq_len**2 * head_dim
    counts = 1 + batch * num_kv_heads * blocks

    def matrix(x: Tensor) -> Tensor:
        return x.view(batch * seq_len, x.size // (batch * seq_len))

    with (
        dev.scratch("attention_statistics", shape, F32) as statistics,
        dev.scratch("attention_taken", (counts,), I32) as taken,
        dev.scratch("attention_sums", of_keys, F32) as sums,
    ):
        dev.launch(
            STATISTICS,
            (ceil_div(seq_len * num_heads * STATISTICS_LANES, STATISTICS_THREADS), batch),
            STATISTICS_THREADS,
            (statistics, taken, d_out, out, lse, counts, seq_len, num_heads),
            consts=consts,
            cost=BESIDE_ATTENTION,
        )
        dev.launch(
            GRADIENT,
            min(tiles, dev.spec.num_sms),
            THREADS,
            (
                *(matrix(d_qkv), matrix(d_out), statistics, matrix(qkv), taken),
                *(sums if parts > 1 else None, heads, batch, seq_len, num_heads, num_kv_heads),
                *(scale, scale * LOG2E),
            ),
            consts=consts,
            smem=shared_bytes(head_dim),
            cost=attention_cost(GRADIENT, BF16, flops, (seq_len, head_dim, seq_len)),
        )
