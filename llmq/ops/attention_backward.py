"""The backward of attention on Hopper, in products of its warpgroups (cu/attention_backward.cu)."""

from __future__ import annotations

from collections.abc import Callable

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import CAPABILITY
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div
from llmq.runtime.sight import ALL, Sight, sees_all_before

ROWS = 64  # of a warpgroup's part of a tile, and of a step
THREADS = 384
STATISTICS_THREADS = 256
STATISTICS_LANES = 8  # threads that share a row
STAGES = {64: 6, 128: 3}  # by head size: steps that are in shared memory or on their way to it

STATISTICS = Kernel(
    "attention_backward.cu",
    "attention_statistics",
    "f32* statistics, i32* taken, const bf16* d_out, const bf16* out, const f32* lse, "
    "i32 seq_len, i32 num_heads",
    capability=CAPABILITY,
)
GRADIENT = Kernel(
    "attention_backward.cu",
    "attention_gradient",
    "bf16[16]* d_qkv, const bf16[64]* d_out, const f32* statistics, const bf16[64]* qkv, "
    "inout i32* taken, i32 batches, i32 seq_len, i32 num_heads, i32 num_kv_heads",
    capability=CAPABILITY,
)


def chosen(dev: Device, qkv: Tensor, sight: Sight) -> Callable[..., None] | None:
    """backward(), where it is the way to compute a gradient on a device; else None. Sequences are
    whole steps there, and queries see all that is before them.

    qkv: (B,T,Hq+2*Hkv,Hd), as of ops.attention.backward.
    """
    _, seq_len, _, head_dim = qkv.shape
    sees_all = sight.starts is None and sees_all_before(sight.window, seq_len)
    fits = qkv.dtype == BF16 and serves(dev.spec.capability, seq_len, head_dim)
    return backward if fits and sees_all else None


def serves(capability: int, seq_len: int, head_dim: int) -> bool:
    """Whether backward() computes such sequences, in BF16. capability: of the device, times 10."""
    return capability == CAPABILITY and head_dim in STAGES and seq_len % ROWS == 0


def shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a block of attention_gradient."""
    stages, tile = STAGES[head_dim], ROWS * head_dim * BF16.itemsize
    own, step, statistics = 2 * 4 * tile, 2 * tile, 2 * ROWS * F32.itemsize
    barriers = 8 * (2 * stages + 3 * 2) + 2 * 32  # and where tiles are
    return own + stages * (step + statistics) + barriers + 1024  # to begin at a multiple of that


def backward(
    dev: Device, tensors: tuple, num_heads: int, num_kv_heads: int, sight: Sight = ALL
) -> None:
    """Gradient of attention, for ops.attention.backward, which checks: `own` in there.

    Args: sight, which hides nothing, and tensors (contiguous):
        d_qkv       out  BF16 (B,T,Hq+2*Hkv,Hd)   every element is written
        d_out, out  in   BF16 (B,T,Hq,Hd)
        lse         in   F32  (B,Hq,T)            of the forward
        qkv         in   BF16 (B,T,Hq+2*Hkv,Hd)

    Cost:    7*B*Hq*T*T*Hd FLOPs; two launches; workspace 8*B*Hq*T bytes.
    """
    d_qkv, d_out, out, lse, qkv = tensors
    batch, seq_len, _, head_dim = qkv.shape
    consts = {"HEAD_DIM": head_dim, "STAGES": STAGES[head_dim]}
    tiles = ceil_div(seq_len, 2 * ROWS) * batch * (num_heads + num_kv_heads)
    shape = (batch, num_heads, seq_len // ROWS, 2, ROWS)

    def matrix(x: Tensor) -> Tensor:
        return x.view(batch * seq_len, x.size // (batch * seq_len))

    with (
        dev.scratch("attention_statistics", shape, F32) as statistics,
        dev.scratch("attention_taken", (1,), I32) as taken,
    ):
        dev.launch(
            STATISTICS,
            (ceil_div(seq_len * num_heads * STATISTICS_LANES, STATISTICS_THREADS), batch),
            STATISTICS_THREADS,
            (statistics, taken, d_out, out, lse, seq_len, num_heads),
            consts=consts,
        )
        dev.launch(
            GRADIENT,
            min(tiles, dev.spec.num_sms),
            THREADS,
            (
                *(matrix(d_qkv), matrix(d_out), statistics, matrix(qkv), taken),
                *(batch, seq_len, num_heads, num_kv_heads),
            ),
            consts=consts,
            smem=shared_bytes(head_dim),
            flops=7 * batch * num_heads * seq_len**2 * head_dim,
        )
