"""A larger micro-batch that is faster in the memory there is: a word of `llmq plan` about runs that
fit.

Larger products and fewer sums of gradients make it faster; what it needs beside activations is
mostly logits, of which --lmhead-chunks makes fewer exist at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmq.options.options import TrainConfig
from llmq.options.rule import Changes
from llmq.options.savers import MIN_CHUNK_ROWS
from llmq.plan.advice import spelled
from llmq.plan.estimate import Planner
from llmq.plan.memory import Limits
from llmq.plan.shrink import ESTIMATE_MARGIN, Shrinker, changed

WORTH = 0.01  # by how much it must be faster to be worth a word
MOST_TIMES = 8  # as large
CHUNKS = (1, 2, 4, 8)  # times as many


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerBatch:
    """flags: as on the command line. speed: tokens per second, device: bytes, by an estimate."""

    flags: str
    speed: float
    device: int


def larger_batch(config: TrainConfig, planner: Planner, limits: Limits) -> LargerBatch | None:
    """The fastest one with as many tokens a step, None if none is noticeably faster.

    Nothing else is arranged otherwise, but chunks of the head, and parts of attention's backward
    that divide the heads of a sequence, which stay as large as they are.
    """
    shrinker = Shrinker(planner, limits.less(ESTIMATE_MARGIN))
    best, speed = None, planner.estimate(config).speed * (1 + WORTH)
    for times in range(2, min(config.grad_accumulation, MOST_TIMES) + 1):
        if config.grad_accumulation % times:
            continue
        changes = _with_batch(config, shrinker, times)
        found = [_larger(config, planner, c) for c in changes if shrinker.fits(changed(config, c))]
        if changes and not found:
            break  # a larger one does not fit either
        for larger in found:
            if larger.speed > speed:
                best, speed = larger, larger.speed
    return best


def _with_batch(config: TrainConfig, shrinker: Shrinker, times: int) -> list[Changes]:
    """So many times as many sequences, and numbers of chunks with which that is allowed."""
    batch = config.batch_size * times
    changes = []
    for more in CHUNKS:
        chunks = config.lmhead_chunks * more
        rows, rest = divmod(batch * config.local_seq_len, chunks)
        if rest or rows < MIN_CHUNK_ROWS:
            continue
        change: Changes = {
            "batch_size": batch,
            "grad_accumulation": config.grad_accumulation // times,
            "lmhead_chunks": chunks,
        }
        if config.attn_bwd_chunks > config.batch_size:
            change["attn_bwd_chunks"] = config.attn_bwd_chunks * times
        if shrinker.allowed(config, change) is not None:
            changes.append(change)
    return changes


def _larger(config: TrainConfig, planner: Planner, change: Changes) -> LargerBatch:
    need = planner.estimate(changed(config, change))
    return LargerBatch(flags=spelled(config, change), speed=need.speed, device=need.device)
