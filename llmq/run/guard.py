"""Divergence guard: judges steps, and decides about rollbacks.

A step is bad if its loss or gradient norm is not finite, or lies many median absolute deviations
(MAD) above the median of earlier accepted steps. The limit comes from steps at least LAG before and
is known when a step is enqueued: the device itself can skip the update. Decisions therefore do not
depend on ranks or resumption. The first steps have no limit: a loss far above the loss of guessing,
or many times the lowest loss so far, counts as bad, but the update is made.
"""

import math
from collections import deque
from collections.abc import Mapping
from operator import index
from typing import Any, NamedTuple

import numpy as np

from llmq.base.dtypes import NO_LIMITS, Limits
from llmq.base.result import Result
from llmq.options.options import TrainConfig

LAG = 2  # in steps: results up to step s - LAG have been read when step s is enqueued
LEAST = 16  # least number of accepted steps from which a limit is computed
WINDOW = 128  # most accepted steps from which a limit is computed
DEVIATIONS = 10.0  # distance of the limit from the median, in deviations
PER_DEVIATION = 1.4826  # standard deviations of a normal distribution per MAD
PERSISTS = 3  # bad steps in a row, with skipped updates, that prove bad weights, not bad data
NEW_LEVEL = 100  # bad steps in a row, with updates, whose values become the new reference
ABOVE_GUESSING = 3.0  # an early loss above this multiple of `Loss.guessing` is bad
GROWN = 10.0  # an early loss above this multiple of the lowest loss, and above LEAST_LOSS, is bad
LEAST_LOSS = 1.0  # losses up to this value, as of memorized text, may grow by a factor of GROWN
ROLLBACKS = 3  # most rollbacks to the same step; one more would not help
LOWERED = 0.1  # factor of the learning rate directly after a rollback
RECOVERY = 100  # steps from a rollback to the full rate: as long as optimizer moments remember


class Judgement(NamedTuple):
    """The judgement of one step. reason: why the step is bad; None for a good step. left_out: True
    if the device made no update because of the guard's limit."""

    reason: str | None = None
    left_out: bool = False

    @property
    def bad(self) -> bool:
        return self.reason is not None


class Track:
    """Keeps the losses or the norms of the newest WINDOW + 1 accepted steps, as (step, value)."""

    def __init__(self, name: str, least: tuple[float, float]):
        """least: the smallest deviation, as a fraction of the median, and as an absolute value."""
        self.name, self._least = name, least
        self.values: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)

    def reference(self, step: int) -> tuple[float, float] | None:
        """Return median and deviation of the values before this step; None for fewer than LEAST
        values."""
        known = [value for at, value in self.values if at <= step - LAG][-WINDOW:]
        if len(known) < LEAST:
            return None
        median = float(np.median(known))
        deviation = PER_DEVIATION * float(np.median(np.abs(np.array(known) - median)))
        part, value = self._least
        return median, max(deviation, part * abs(median), value)

    def limit(self, step: int) -> float:
        """Return the greatest value with which this step is good, exact in F32; 0: no limit."""
        known = self.reference(step)
        return 0.0 if known is None else float(np.float32(known[0] + DEVIATIONS * known[1]))

    def excess(self, step: int, value: float) -> str:
        """Return text that says how far a value lies above the median, in deviations."""
        median, deviation = self.reference(step)
        score = (value - median) / deviation
        far = f"{score:.1f} deviations above its median {median:.6g}"
        return f"the {self.name} {value:.6g} is {far}"

    def before(self, step: int) -> None:
        """Set the steps of later values back to step - LAG, so that the values count for this
        step."""
        known = [(min(at, step - LAG), value) for at, value in self.values]
        self.values.clear()
        self.values.extend(known)


class Guard:
    """Judges each step of a run once, in order.

    in_row: number of newest steps in a row that were bad. unchanged: number of newest steps in a
    row that changed no weights. last_bad: the newest bad step; -1: none. not_finite: words about
    the newest step's loss or norm if not finite, else None. trouble: the bad step because of which
    a rollback is due; None: no rollback is due. level: how often accepts_new_level has dropped the
    values of earlier steps. rollbacks: steps [to, from] of each rollback. origin: the run's first
    checkpoint; None: its first weights.
    """

    def __init__(self, config: TrainConfig, guessing: float = math.inf):
        """guessing: the loss of a model that guesses, see `Loss.guessing`."""
        self.guessing = guessing
        self.mode = config.guard
        # Least deviations: 30 % of the norm, 1 % of the loss and 0.01 nats. If values are nearly
        # equal, as in the first steps, small differences must not count as outliers. Gradient
        # clipping handles norms up to 4 times the median.
        self.loss = Track("loss", (0.01, 0.01))
        self.norm = Track("gradient norm", (0.3, 0.0))
        self.load({})

    # -- before a step ---------------------------------------------------------------------------

    def limits(self, step: int) -> Limits:
        """Return the loss and norm beyond which this step is bad; NO_LIMITS with --guard off, and
        zeros for the first steps, which have no limit."""
        if self.mode == "off":
            return NO_LIMITS
        return Limits(norm=self.norm.limit(step), loss=self.loss.limit(step))

    @property
    def leaves_out(self) -> bool:
        """Return True if the device must make no update beyond the limits."""
        return self.mode in ("skip", "rollback")

    def rate_factor(self, step: int) -> float:
        """Return the factor of a step's learning rate, which rises from LOWERED at a rollback to 1
        within RECOVERY steps."""
        if not self.rollbacks:
            return 1.0
        done = step - self.rollbacks[-1][0]
        if not 0 <= done < RECOVERY:
            return 1.0
        return LOWERED + (1.0 - LOWERED) * done / RECOVERY

    def is_due(self, steps_done: int) -> bool:
        """Return True if a rollback is due, exactly LAG steps after `trouble`. The delay is fixed
        because the host may learn of bad steps sooner or later."""
        return self.trouble is not None and steps_done >= self.trouble + LAG

    # -- after a step ----------------------------------------------------------------------------

    def judge(self, step: int, result: Result, limits: Limits) -> Judgement:
        """Judge a step by its limits. A step without targets counts neither as good nor as bad."""
        judgement = Judgement() if result.tokens == 0 else self._judged(step, result, limits)
        no_update = judgement.left_out or result.tokens == 0 or not math.isfinite(result.norm)
        self.unchanged = self.unchanged + 1 if no_update else 0
        return judgement

    def _judged(self, step: int, result: Result, limits: Limits) -> Judgement:
        self.not_finite = None
        values = ((self.loss, result.loss, limits.loss), (self.norm, result.norm, limits.norm))
        for track, value, _ in values:
            if not math.isfinite(value):
                self.not_finite = f"the {track.name} is {value}"
                return self._bad(step, Judgement(self.not_finite))
        for track, value, limit in values:
            if 0 < limit < value:
                reason = track.excess(step, value)
                return self._bad(step, Judgement(reason, left_out=self.leaves_out))
        if limits == NO_LIMITS and (reason := self._early(result.loss)) is not None:
            return self._bad(step, Judgement(reason))
        for track, value, _ in values:
            track.values.append((step, value))
        self.in_row = 0
        return Judgement()

    def _early(self, loss: float) -> str | None:
        """Return why the loss of a step without a limit is bad; None if the loss is good."""
        if self.mode == "off" or self.level > 0:
            return None
        lowest = min((value for _, value in self.loss.values), default=math.inf)
        if loss > ABOVE_GUESSING * self.guessing:
            times = loss / self.guessing
            return f"the loss {loss:.6g} is {times:.1f} times that of guessing, {self.guessing:.4g}"
        if self.guessing < math.inf and loss > max(GROWN * lowest, LEAST_LOSS):
            return f"the loss {loss:.6g} is {loss / lowest:.1f} times the lowest, {lowest:.6g}"
        return None

    def _bad(self, step: int, judgement: Judgement) -> Judgement:
        self.in_row, self.last_bad = self.in_row + 1, step
        was_good = len(self.loss.values) > 0  # a rollback helps only if a step was good
        if self.mode == "rollback" and was_good and self.in_row >= PERSISTS:
            self.trouble = step if self.trouble is None else self.trouble
        return judgement

    def accepts_new_level(self) -> bool:
        """Drop the values of earlier steps and return True after NEW_LEVEL bad steps in a row whose
        updates were made, because the data may have changed."""
        if self.in_row < NEW_LEVEL:
            return False
        self.level, self.in_row = self.level + 1, 0
        for track in (self.loss, self.norm):
            track.values.clear()
        return True

    # -- rollbacks and state ---------------------------------------------------------------------

    def may_go_back(self, to: int) -> bool:
        """Return True if fewer than ROLLBACKS rollbacks have led to the step `to`."""
        return sum(target == to for target, _ in self.rollbacks) < ROLLBACKS

    def went_back(self, to: int, steps_done: int) -> None:
        """Record a rollback from steps_done to the step `to`. The values of earlier steps stay:
        without them the next divergence would set the limits."""
        self.rollbacks = [*self.rollbacks, [to, steps_done]]
        self.in_row, self.unchanged, self.last_bad = 0, 0, min(self.last_bad, to - 1)
        self.trouble, self.not_finite = None, None
        for track in (self.loss, self.norm):
            track.before(to)

    @property
    def state(self) -> dict[str, Any]:
        """Return the state on which later decisions depend, as JSON values, for a checkpoint."""
        values = {"losses": self.loss.values, "norms": self.norm.values}
        kept = "in_row unchanged not_finite last_bad trouble level rollbacks origin".split()
        tracks = {name: [list(pair) for pair in pairs] for name, pairs in values.items()}
        return tracks | {name: getattr(self, name) for name in kept}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state`; {} is the state before the first step. Raises TypeError,
        ValueError or AttributeError for a malformed state."""
        for track, name in ((self.loss, "losses"), (self.norm, "norms")):
            track.values.clear()
            track.values.extend((index(step), float(value)) for step, value in state.get(name, []))
        self.in_row, self.level = index(state.get("in_row", 0)), index(state.get("level", 0))
        self.unchanged, problem = index(state.get("unchanged", 0)), state.get("not_finite")
        self.not_finite = None if problem is None else str(problem)
        self.last_bad = index(state.get("last_bad", -1))
        trouble = state.get("trouble") if self.mode == "rollback" else None
        self.trouble = None if trouble is None else index(trouble)
        self.rollbacks = [[index(to), index(before)] for to, before in state.get("rollbacks", [])]
        self.origin: str | None = state.get("origin")
