"""Cross-entropy of next-token logits, fused with its gradient, and the step's loss statistics."""

from dataclasses import replace
from functools import cache

import numpy as np

from llmq.base.dtypes import TOKEN_STATS
from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 512
STATS_THREADS = 1024
MAX_VECTORS = 19  # most vectors of a row in a thread, of 512 threads with 128 registers each
CLUSTER_ROWS = 4  # rows that a cluster computes one after another

_ROW_ARGS = (
    "T[rows,padded_vocab] logits, out f32[rows] losses, out f32[rows] lse, i32[rows] targets, "
    "out Q[rows,padded_vocab]? codes, i64 rows, i32 vocab, i32 padded_vocab, f32 z_loss, "
    "f32 code_factor"
)
_RULES = "padded_vocab % vector_T, vocab >= 1, vocab <= padded_vocab"
_FILE, _NAME = "loss/cross_entropy.cu", "cross_entropy_forward_backward"
FORWARD_BACKWARD = Kernel(_FILE, _NAME, f"inout {_ROW_ARGS}", where=_RULES)
FORWARD_BACKWARD_REGISTERS = replace(FORWARD_BACKWARD, entry=f"{_NAME}_registers")
# The same entries have separate declarations for codes, with which they do not write logits.
CODES = Kernel(_FILE, _NAME, _ROW_ARGS, where=_RULES, types="T=bf16")
CODES_REGISTERS = replace(CODES, entry=f"{_NAME}_registers")
FORWARD = Kernel(
    _FILE,
    "cross_entropy_forward",
    "out f32[rows] losses, out f32[rows] lse, T[rows,padded_vocab] logits, i32[rows] targets, "
    "i64 rows, i32 vocab, i32 padded_vocab",
    where=_RULES,
)
ADD_STATS = Kernel(
    _FILE,
    "cross_entropy_stats",
    "inout f64[statistics] stats, f32[batch,seq_len] losses, f32[batch,seq_len] lse, "
    "i32[batch,seq_len] targets, i64 n, i32 seq_len, i32 by_weight",
    where=f"statistics >= {len(TOKEN_STATS)} + by_weight",
)


def register_layout(row_bytes: int, capability: int) -> dict[str, int] | None:
    """Compile-time constants of a kernel with rows in registers; None if a row does not fit.

    THREADS: threads per block. VECTORS: vectors of 16 bytes per thread. CLUSTER: blocks of a
    cluster that shares a row, 1 below compute capability 9.0. ROWS: rows that a cluster computes
    one after another. One block per row is fastest, because blocks of a cluster start and end
    together. Two blocks of half the threads fit into a multiprocessor, and one reads and writes
    while the other computes. Several rows pay only in clusters, which read the next row while they
    write one."""
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
    """Replace logits by weight * (softmax(logits) * (1 + z_loss * lse) - onehot(target)).

    The result is the gradient d_logits of weight * (loss + z_loss / 2 * lse^2), not divided by any
    count.

    targets: ids, not checked; negative: masked, with loss and gradient 0. losses: lse - the
    target's logit. lse: log-sum-exp of the row, also of masked rows. Columns >= vocab_size are
    ignored on entry, and 0 on return. codes: out, d_logits / code_scale, rounded to nearest even
    and clamped; logits, BF16, then stay as they are. weights: F32 (rows,), factors of gradients
    only; None: all are 1. softcap: softcap * tanh(logit / softcap) replaces each logit.

    Cost:    logits read once if registers hold a row, else twice; d_logits or codes written.
    """
    kernels = (FORWARD_BACKWARD, FORWARD_BACKWARD_REGISTERS)
    if codes is not None:
        kernels = (CODES, CODES_REGISTERS)
    rows, padded_vocab = kernels[0].dims(logits=logits)
    args = (logits, losses, lse, targets, codes, rows, vocab_size, padded_vocab)
    args += (z_loss, 1.0 / code_scale)
    consts = {"CODES": int(codes is not None)} | _cap(softcap)
    layout = None
    if softcap is None:  # a softcap needs more registers
        layout = register_layout(padded_vocab * logits.dtype.itemsize, dev.spec.capability)
    if layout is None:
        _launch(dev, kernels[0], rows, THREADS, args, consts, weights)
        return
    blocks = ceil_div(rows, layout["ROWS"]) * layout["CLUSTER"]
    _launch(dev, kernels[1], blocks, layout["THREADS"], args, layout | consts, weights)


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
    """Write losses and lse as forward_backward does; logits stay as they are."""
    rows, padded_vocab = FORWARD.dims(logits=logits)
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
    """Add a micro-step to the statistics of the optimizer step, in F64 and in a fixed order.

    loss, count, lse_sum, lse_max: over unmasked targets; loss_1k, tokens_1k: over unmasked targets
    at positions < 1024. The caller zeroes stats at the start of the step, so lse_max is never < 0.

    stats: begins with llmq.base.dtypes.TOKEN_STATS. losses: 0 in masked positions. targets:
    negative if masked. weights: F32, factors of losses; None: all are 1. by_weight: True if count
    and tokens_1k are sums of weights; the statistic after TOKEN_STATS then is the number of
    targets.
    """
    _, seq_len = ADD_STATS.dims(targets=targets)
    args = (stats, losses, lse, targets, targets.size, seq_len, int(by_weight))
    _launch(dev, ADD_STATS, 1, STATS_THREADS, args, {}, weights)


def _cap(softcap: float | None) -> dict[str, int]:
    """Compile-time constant of a softcap: the bits of the F32 number."""
    return {} if softcap is None else {"SOFTCAP": int(np.float32(softcap).view(np.uint32))}


@cache
def _weighted(kernel: Kernel) -> Kernel:
    shape = next(arg.shape for arg in kernel.declared if arg.name == "losses")
    dims = ",".join(dim.text for dim in shape)
    return replace(kernel, args=f"{kernel.args}, f32[{dims}] weights")


def _launch(
    dev: Device,
    kernel: Kernel,
    blocks: int,
    threads: int,
    args: tuple,
    consts: dict[str, int],
    weights: Tensor | None,
) -> None:
    """Launch a kernel. With weights, compile the kernel with WEIGHTED = 1, and pass weights as the
    last argument."""
    if weights is not None:
        kernel, args, consts = _weighted(kernel), (*args, weights), consts | {"WEIGHTED": 1}
    dev.launch(kernel, blocks, threads, args, consts=consts)
