"""The kernels that may compute a layer's attention, in each direction."""

from __future__ import annotations

from llmq.ops import attention_backward
from llmq.ops.attention import Sight
from llmq.runtime.sight import sees_all_before

# By the largest head size that it is for: the share of the causal pairs of query and key below
# which a window makes our backward the faster one. cuDNN's takes as long with a window as without,
# ours a + b * share (docs/decisions/kernels.md; measured at T = 1024: h100_attention.txt). Both
# also compute at the edges of what is seen, which costs cuDNN more and counts less in longer
# sequences: the shares are those where the two meet at T = 8192, below those at T = 1024.
NATIVE_BACKWARD = {64: 0.9, 128: 0.45}
MEASURED = 90  # compute capability, times 10, where this was: nothing is left to time there


def directions(
    backend: str, head_dim: int, seq_len: int, window: int | None, capability: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The backends that may compute forward and backward, the first one where nothing is timed. The
    result that one direction leaves to the other is the same for all.

    backend: "native" or "cudnn" in both directions, or "auto" where cuDNN computes the case: it
    does so forward, and backward unless ours is faster: on Hopper in whole sequences, elsewhere,
    too, where the layer's window hides enough. Where it does, and this was not measured, ours may
    turn out to be faster. window: positions that a query sees, its own included; None: all.
    capability: compute capability times 10.
    """
    if backend != "auto":
        return (backend,), (backend,)
    library = ("cudnn",) if capability == MEASURED else ("cudnn", "native")
    whole = sees_all_before(window, seq_len)
    if whole and attention_backward.is_supported(capability, seq_len, head_dim):
        return library, ("native",)
    limit = next((share for size, share in NATIVE_BACKWARD.items() if head_dim <= size), 0.0)
    seen = Sight(window=min(window or seq_len, seq_len)).pairs(seq_len) / seq_len**2
    return library, ("native",) if seen < limit else library
