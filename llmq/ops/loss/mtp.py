"""Inputs and statistics of a head for multi-token prediction: see `model/mtp.py`."""

from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS, STATS_THREADS = 256, 1024

SHIFT = Kernel(
    "loss/mtp.cu",
    "mtp_shift",
    "out i32[B,seq_len] tokens, out i32[B,seq_len] targets, i32[B,seq_len] of_tokens, "
    "i32[B,seq_len] of_targets, i32[B,seq_len]? starts, i64 n, i32 seq_len",
)
STATS = Kernel(
    "loss/mtp.cu",
    "mtp_stats",
    "inout f64[2] stats, f32[n] losses, f32[n] trunk, i32[n] targets, i32[every] of_targets, "
    "i64 n, i64 every",
)


def shift(
    dev: Device,
    tokens: Tensor,
    targets: Tensor,
    of_tokens: Tensor,
    of_targets: Tensor,
    starts: Tensor | None,
) -> None:
    """Write to each position the token and target of the next position in the same document. The
    target at a document's last position is masked. tokens, targets: (B, T). of_tokens, of_targets:
    the trunk's. starts: first position of each token's document; None: 0."""
    n, seq_len = of_tokens.size, of_tokens.shape[1]
    args = (tokens, targets, of_tokens, of_targets, starts, n, seq_len)
    dev.launch(SHIFT, ceil_div(n, THREADS), THREADS, args)


def stats(
    dev: Device, stats: Tensor, losses: Tensor, trunk: Tensor, targets: Tensor, of_targets: Tensor
) -> None:
    """Add two means to stats, F64 (2,), each times the number of the trunk's targets: the head's
    loss, and min(1, q / p) for the head's probability q and the trunk's probability p of a target.
    The second mean is the share of the head's guesses that speculative sampling accepts, if targets
    are samples of the trunk. losses: F32 (n,), losses of the head. trunk: losses of the trunk at
    the same positions. of_targets: all targets of the trunk, n or more."""
    sizes = losses.size, of_targets.size
    dev.launch(STATS, 1, STATS_THREADS, (stats, losses, trunk, targets, of_targets, *sizes))
