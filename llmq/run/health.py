"""Health of a run: how the run reacts to good and bad steps."""

import math

from llmq.base.callback import Callback, StepDone
from llmq.base.dtypes import NO_LIMITS, Limits
from llmq.base.errors import LlmqError
from llmq.checkpoint.store import checkpoint_step
from llmq.run.diagnose import check_update, not_moved
from llmq.run.guard import NEW_LEVEL, ROLLBACKS, Guard
from llmq.run.lifecycle import Lifecycle
from llmq.run.metrics import Reporter
from llmq.run.trainer import Trainer

SHOWN = 3  # number of first bad steps in a row that are reported; later every tenth is


class HealthMonitor(Callback):
    """Lets the guard judge each step, passes verdicts to checkpoints, and rolls back after too many
    bad steps."""

    def __init__(self, trainer: Trainer, reporter: Reporter, guard: Guard, lifecycle: Lifecycle):
        self.trainer, self.reporter = trainer, reporter
        self.guard, self.lifecycle = guard, lifecycle
        self._limits: dict[int, Limits] = {}  # limits by step, until the step's result is known

    def limits(self, step: int) -> Limits:
        """Return the limits of a step for the device; the guard judges the result by the same
        limits."""
        self._limits[step] = limits = self.guard.limits(step)
        return limits if self.guard.leaves_out else NO_LIMITS

    def learning_rate(self, step: int) -> float:
        """Return the schedule's learning rate for a step, lowered after a rollback."""
        return self.trainer.learning_rate(step) * self.guard.rate_factor(step)

    def on_step(self, step: StepDone) -> None:
        """Judge a step by its result, and report a bad step. Raises LlmqError if the run cannot
        recover."""
        number, result, guard = step.step, step.result, self.guard
        limits, in_row = self._limits.pop(number), guard.in_row
        judgement = guard.judge(number, result, limits)
        self.lifecycle.verdict(number, judgement.reason)
        if not judgement.bad and in_row:
            text = f"Step {number} is good again, after {in_row} bad ones"
            self.reporter.guard(number, "good", text)
        if judgement.bad:
            skipped = judgement.left_out or not math.isfinite(result.norm)
            shown = not skipped and (guard.in_row <= SHOWN or guard.in_row % 10 == 0)
            text = f"WARNING: step {number} is bad: {judgement.reason}"
            given = {"limit_loss": limits.loss, "limit_norm": limits.norm}
            action = "skip" if skipped else "warn"
            self.reporter.guard(number, action, text, shown=shown, **given)
            if not skipped and guard.accepts_new_level():
                text = f"WARNING: {NEW_LEVEL} bad steps in a row: what is usual is measured anew"
                self.reporter.guard(number, "level", text)
        left_out = judgement.reason if judgement.left_out else None
        check_update(self.trainer.ranks, self.reporter, step, guard, left_out)

    def roll_back(self) -> None:
        """Load the newest good checkpoint of the stage, or the first weights, and keep the position
        in the training data. Raises LlmqError if no good state exists, or if rollbacks to this
        state have not helped."""
        trainer, guard = self.trainer, self.guard
        bad, before = guard.trouble, trainer.steps_done
        self.lifecycle.poll(wait=True)
        path = self.lifecycle.rollback_target(bad)
        to = 0 if path is None else checkpoint_step(path)
        if not guard.may_go_back(to):
            again = "begin again" if path is None else "go on from there"
            raise LlmqError(
                f"--guard rollback: step {bad} was the last of too many bad ones, and {ROLLBACKS} "
                f"returns to step {to} have not helped: look at the data, or {again} with a lower "
                "--learning-rate"
            )
        whence = "the beginning" if path is None else f"checkpoint '{path}'"
        text = f"WARNING: too many bad steps: back from step {before} to {to}, {whence}"
        rest = "; the data since then are left out"
        self.reporter.guard(bad, "rollback", text + rest, back_to=to, steps_done=before)
        if path is None:
            trainer.restart()
        else:
            run = trainer.run
            trainer.load(path, new_data=True)
            trainer.run = run
        guard.went_back(to, before)

    def warn_at_end(self, step: int) -> None:
        """Warn of parameters that have not moved, and of bad steps at the end of a run."""
        for line in not_moved(self.trainer.ranks) if step else ():
            self.reporter.message(f"WARNING: {line}", step)
        if in_row := self.guard.in_row:
            last = f"WARNING: the last {in_row} steps were bad, up to step {step - 1}"
            self.reporter.message(f"{last}: the model is hardly what it should be", step)
