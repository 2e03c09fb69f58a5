"""A larger micro-batch that is faster in the memory there is: a word of `llmq plan` about runs that
fit.

Larger products and fewer sums of gradients make it faster; what it needs beside activations is
mostly logits, of which --lmhead-chunks makes fewer exist at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmq.config.options import TrainConfig
from llmq.plan.advice import spelled
from llmq.plan.estimate import Planner
from llmq.plan.memory import Limits
from llmq.plan.shrink import MARGIN, MIN_CHUNK_ROWS, Changes, Shrinker

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

    Nothing else is arranged otherwise, but chunks of the head.
    """
    shrinker = Shrinker(planner, limits.less(MARGIN))
    best, speed = None, planner.estimate(config).speed * (1 + WORTH)
    for times in range(2, min(config.grad_accumulation, MOST_TIMES) + 1):
        if config.grad_accumulation % times:
            continue
        found = _with_batch(config, shrinker, times)
        if found is None:
            break  # a larger one does not fit either
        if found.speed > speed:
            best, speed = found, found.speed
    return best


def _with_batch(config: TrainConfig, shrinker: Shrinker, times: int) -> LargerBatch | None:
    """So many times as many sequences, and the fastest number of chunks with which they fit."""
    batch = config.batch_size * times
    found = []
    for more in CHUNKS:
        chunks = config.lmhead_chunks * more
        rows, rest = divmod(batch * config.seq_len, chunks)
        if rest or rows < MIN_CHUNK_ROWS:
            continue
        change: Changes = {
            "batch_size": batch,
            "grad_accumulation": config.grad_accumulation // times,
            "lmhead_chunks": chunks,
        }
        then = shrinker.allowed(config, change)
        if then is not None and shrinker.fits(then):
            need = shrinker.planner.estimate(then)
            flags = spelled(config, change)
            found.append(LargerBatch(flags=flags, speed=need.speed, device=need.device))
    return max(found, key=lambda larger: larger.speed, default=None)
