"""Cross-entropy of next-token logits, fused with its gradient, and the step's loss statistics."""

import numpy as np

from llmq.base.dtypes import BF16, F32, FP8, I32, TOKEN_STATS
from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES, expect_float, expect_stats, launch_weighted
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 512
STATS_THREADS = 1024
MAX_VECTORS = 19  # of a row that one thread holds: with 128 registers each, 512 threads fit
CLUSTER_ROWS = 4

_ROW_ARGS = (
    "T* logits, f32* losses, f32* lse, const i32* targets, Q*? codes, "
    "i64 rows, i32 vocab, i32 padded_vocab, f32 z_loss, f32 code_factor"
)
_NAME = "cross_entropy_forward_backward"
FORWARD_BACKWARD = Kernel("loss/cross_entropy.cu", _NAME, args="inout " + _ROW_ARGS)
FORWARD_BACKWARD_REGISTERS = Kernel(
    "loss/cross_entropy.cu", f"{_NAME}_registers", args="inout " + _ROW_ARGS
)
# The same entries; declared apart because with codes they only read the logits.
CODES = Kernel("loss/cross_entropy.cu", _NAME, args="const " + _ROW_ARGS)
CODES_REGISTERS = Kernel("loss/cross_entropy.cu", f"{_NAME}_registers", args="const " + _ROW_ARGS)
FORWARD = Kernel(
    "loss/cross_entropy.cu",
    "cross_entropy_forward",
    args="f32* losses, f32* lse, const T* logits, const i32* targets, "
    "i64 rows, i32 vocab, i32 padded_vocab",
)
ADD_STATS = Kernel(
    "loss/cross_entropy.cu",
    "cross_entropy_stats",
    args="inout f64* stats, const f32* losses, const f32* lse, const i32* targets, "
    "i64 n, i32 seq_len, i32 by_weight",
)


def register_layout(row_bytes: int, capability: int) -> dict[str, int] | None:
    """How rows are held in registers, as compile-time constants; None where a row does not fit.
    THREADS per block, VECTORS of 16 bytes per thread, blocks per CLUSTER (compute capability 9.0
    and later) that share a row, ROWS one after the other in each. One block is the fastest: a
    cluster's start and end together. Two blocks of half the threads fit into a multiprocessor, and
    belong to different rows: one reads and writes while the other computes. Only with clusters does
    it pay to go on to another row, the next one being read while one is written."""
    vectors = ceil_div(row_bytes, VECTOR_BYTES)
    layouts = [(THREADS // 2, 1), (THREADS, 1)]
    if capability >= 90:
        layouts += [(THREADS // 2, 4), (THREADS // 2, 8), (THREADS, 8)]
    for threads, cluster in layouts:
        per_thread = ceil_div(vectors, threads * cluster)
        if per_thread <= MAX_VECTORS:
            rows = 1 if cluster == 1 else CLUSTER_ROWS
            return {"THREADS": threads, "VECTORS": per_thread, "CLUSTER": cluster, "ROWS": rows}
    return None


def forward_backward(
    dev: Device,
    logits: Tensor,
    losses: Tensor,
    lse: Tensor,
    targets: Tensor,
    vocab_size: int,
    z_loss: float,
    *,
    codes: Tensor | None = None,
    code_scale: float = 1.0,
    weights: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Replaces logits by d_logits = softmax(logits) * (1 + z_loss * lse) - onehot(target).

    That is the gradient of loss + z_loss / 2 * lse^2, not divided by any count of tokens. Rows of
    weights have it times theirs.

    Args (X is BF16 or F32; BF16 with codes):
        logits   inout  X   (rows, Vp)   Vp a multiple of 16 bytes; columns >= vocab_size are
                                         ignored on entry and 0 on return
        losses   out    F32 (rows,)      lse - logit of the target; 0 for masked rows
        lse      out    F32 (rows,)      log-sum-exp of the row, also for masked rows
        targets  in     I32 (rows,)      ids in [0, vocab_size); negative: masked, gradient 0
        codes    out    FP8 (rows, Vp)   or None; E4M3 or E5M2: d_logits / code_scale, rounded to
                                         nearest even and clamped, instead of d_logits in logits
        weights  in     F32 (rows,)      or None: all are 1; losses and lse have none
        softcap: softcap * tanh(logit / softcap) counts in the place of each logit; None: itself

    Cost:    logits read once where registers hold a row, else twice; d_logits or codes written.
    Targets are not checked.
    """
    op = "cross_entropy.forward_backward"
    rows, padded_vocab = _check(op, logits, losses, lse, targets, vocab_size)
    kernels = (FORWARD_BACKWARD, FORWARD_BACKWARD_REGISTERS)
    if codes is not None:
        kernels = (CODES, CODES_REGISTERS)
        _check_codes(op, codes, logits)
    args = (logits, losses, lse, targets, codes, rows, vocab_size, padded_vocab)
    args += (z_loss, 1.0 / code_scale)
    consts = {"CODES": int(codes is not None)} | _cap(softcap)
    layout = None
    if softcap is None:  # it needs more registers
        layout = register_layout(padded_vocab * logits.dtype.itemsize, dev.spec.capability)
    if weights is not None:
        expect(op, "weights", weights, F32, (rows,))
    if layout is None:
        launch_weighted(dev, kernels[0], rows, THREADS, args, consts, weights)
        return
    blocks = ceil_div(rows, layout["ROWS"]) * layout["CLUSTER"]
    launch_weighted(dev, kernels[1], blocks, layout["THREADS"], args, layout | consts, weights)


def forward(
    dev: Device,
    losses: Tensor,
    lse: Tensor,
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    *,
    softcap: float | None = None,
) -> None:
    """losses and lse of forward_backward, without a gradient; logits stay as they are.

    Args (X is BF16 or F32):
        losses   out  F32 (rows,)
        lse      out  F32 (rows,)
        logits   in   X   (rows, Vp)   Vp a multiple of 16 bytes; columns >= vocab_size are ignored
        targets  in   I32 (rows,)      ids in [0, vocab_size); negative: masked, loss 0
        softcap: as in forward_backward

    Targets are not checked.
    """
    rows, padded_vocab = _check("cross_entropy.forward", logits, losses, lse, targets, vocab_size)
    args = (losses, lse, logits, targets, rows, vocab_size, padded_vocab)
    dev.launch(FORWARD, rows, THREADS, args, consts=_cap(softcap))


def stats(
    dev: Device,
    stats: Tensor,
    losses: Tensor,
    lse: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    by_weight: bool = False,
) -> None:
    """Adds a micro-step to the statistics of the optimizer step, in F64 and in a fixed order.

    loss, count, lse_sum, lse_max: over targets that are not masked; loss_1k, tokens_1k: of these
    the positions < 1024. The caller zeroes stats at the start of the step, so lse_max is never < 0.

    Args:
        stats    inout  F64 (s,)     begins with llmq.base.dtypes.TOKEN_STATS
        losses   in     F32 (B, T)   0 where masked
        lse      in     F32 (B, T)
        targets  in     I32 (B, T)   negative: masked
        weights  in     F32 (B, T)   of the losses; or None: all are 1
        by_weight: count and tokens_1k are sums of weights; the statistic behind TOKEN_STATS is how
            many targets there are
    """
    op = "cross_entropy.stats"
    expect_stats(op, stats, (*TOKEN_STATS, *["tokens"] * by_weight))
    if len(targets.shape) != 2:
        raise ValueError(f"{op}: targets must have shape (B, T), got {targets.shape}")
    expect(op, "targets", targets, I32, targets.shape)
    expect(op, "losses", losses, F32, targets.shape)
    expect(op, "lse", lse, F32, targets.shape)
    args = (stats, losses, lse, targets, targets.size, targets.shape[1], int(by_weight))
    if weights is not None:
        expect(op, "weights", weights, F32, targets.shape)
    launch_weighted(dev, ADD_STATS, 1, STATS_THREADS, args, {}, weights)


def _cap(softcap: float | None) -> dict[str, int]:
    """The constant of kernels with a soft cap: its bits as F32."""
    return {} if softcap is None else {"SOFTCAP": int(np.float32(softcap).view(np.uint32))}


def _check(
    op: str, logits: Tensor, losses: Tensor, lse: Tensor, targets: Tensor, vocab_size: int
) -> tuple[int, int]:
    expect_float(op, "logits", logits)
    if len(logits.shape) != 2 or logits.shape[1] * logits.dtype.itemsize % VECTOR_BYTES:
        raise ValueError(f"{op}: logits must be (rows, Vp), Vp a multiple of 16 bytes: {logits!r}")
    rows, padded_vocab = logits.shape
    if not 0 < vocab_size <= padded_vocab:
        raise ValueError(f"{op}: vocab_size must be in [1, {padded_vocab}], got {vocab_size}")
    expect(op, "losses", losses, F32, (rows,))
    expect(op, "lse", lse, F32, (rows,))
    expect(op, "targets", targets, I32, (rows,))
    return rows, padded_vocab


def _check_codes(op: str, codes: Tensor, logits: Tensor) -> None:
    expect(op, "codes", codes, None, logits.shape)
    if codes.dtype not in FP8:
        raise TypeError(f"{op}: codes must be E4M3 or E5M2, got {codes.dtype.label}")
    if logits.dtype != BF16:
        raise TypeError(f"{op}: logits must be BF16 with codes, got {logits.dtype.label}")
