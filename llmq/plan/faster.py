"""The words of `llmq plan` on what would be faster: a larger micro-batch, where a run fits, and
8-bit numbers, beside what a search has found without changing formats.

Larger products and fewer sums of gradients make a larger micro-batch faster; what it needs beside
activations is mostly logits, of which --lmhead-chunks makes fewer exist at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmq.options.options import TrainConfig
from llmq.options.rule import Changes
from llmq.options.savers import MIN_CHUNK_ROWS
from llmq.plan.advice import NOTICEABLE, spelled
from llmq.plan.estimate import Planner
from llmq.plan.fit import Candidate, Fit
from llmq.plan.memory import Limits
from llmq.plan.shrink import ESTIMATE_MARGIN, FP8, REARRANGING, Shrinker, changed, having, savers


@dataclass(frozen=True, slots=True, kw_only=True)
class EightBitGain:
    """Number formats that would be faster: as flags, and tokens per second by an estimate."""

    flags: str
    speed: float


def eight_bit_gain(fit: Fit, best: Candidate) -> list[EightBitGain]:
    """Those of fp8 products, an fp8 LM head beside them, MLPs that keep codes, and 8-bit moments by
    which a step gets noticeably faster. best: what fit has found. Formats are tried though they
    were given."""
    base = fit.base
    fp8 = {} if base.is_fp8 else FP8
    alone = _Tried(fit, best, {}, fit.changes_of(best))
    products = _Tried(fit, best, fp8, ()) if fp8 else alone
    found = [products.told] if products.gains_over(alone) else []
    if products.speed:
        (head,) = savers("head")
        beside = _Tried(fit, best, fp8 | head(base), products.changes)
        found += [beside.told] if beside.gains_over(products) else []
    others = [change for saver in savers("others") if (change := saver(base))]
    tried = [_Tried(fit, best, change, alone.changes) for change in others]
    return found + [each.told for each in tried if each.gains_over(alone)]


class _Tried:
    """Some formats, and how fast they are with all that may be arranged otherwise with them. told:
    for the user. speed: 0 if the card cannot compute them, other options forbid them, or nothing
    makes them fit. changes: what is arranged otherwise."""

    def __init__(self, fit: Fit, best: Candidate, change: Changes, start: Sequence[Changes]):
        """start: changes to begin with, of formats that are nearly these."""
        self._differs = any(getattr(fit.base, name) != value for name, value in change.items())
        self._fit, self.changes = fit, list(start)
        self._shrinker = Shrinker(fit.planner, fit.shrinker.limits, fit.fixed - set(change))
        self.speed = best.need.speed
        if self._differs:
            computes = "matmul_dtype" not in change or fit.planner.card.fp8 > 0
            self.speed = self._searched(best, change) if computes else 0.0
        self.told = EightBitGain(flags=spelled(fit.base, change), speed=self.speed)

    def gains_over(self, other: _Tried) -> bool:
        """Whether it is worth a word."""
        return self._differs and self.speed > (1 + NOTICEABLE) * other.speed

    def _searched(self, best: Candidate, change: Changes) -> float:
        """With the micro-batch of the best, everything else arranged anew."""
        size = best.config.batch_size
        given = next(each for each in self._fit.ladder() if each.batch_size == size)
        config = self._shrinker.allowed(given, change)
        if config is None:
            return 0.0
        self.changes = self._shrinker.shrink(config, REARRANGING, self.changes)
        then = having(config, self.changes)
        if not self._shrinker.fits(then):
            return 0.0
        return self._fit.planner.estimate(self._fit.faster(then)).speed


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
    """The fastest one with as many tokens a step, None if none is noticeably faster. Nothing else
    is arranged otherwise, but chunks of the head, and parts of attention's backward that divide the
    heads of a sequence, which stay as large as they are."""
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
