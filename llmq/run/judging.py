"""The fate of each step of a run: judged, logged, and where nothing else helps undone."""

import math
from pathlib import Path
from typing import Any

from llmq.base.dtypes import NO_LIMITS, Limits
from llmq.base.errors import LlmqError, ModelError
from llmq.checkpoint.store import checkpoint_step
from llmq.run.checkpoints import Checkpoints
from llmq.run.diagnose import UpdateCheck, not_moved
from llmq.run.evaluations import Evaluations
from llmq.run.events import Events, Member, StepDone
from llmq.run.guard import NEW_LEVEL, ROLLBACKS, Guard
from llmq.run.metrics import Reporter
from llmq.run.trainer import Trainer

SHOWN = 3  # bad steps in a row whose lines are shown; then every tenth


class Judging(Member):
    """Judges the steps of a run, and goes back where too many are bad."""

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        guard: Guard,
        checkpoints: Checkpoints,
        events: Events,
    ):
        """events: of the members whose state a rollback and a resume bring back."""
        self.trainer, self.reporter, self.guard = trainer, reporter, guard
        self.checkpoints = checkpoints
        self.update_check = UpdateCheck(trainer.ranks, reporter)
        self._events = events

    def is_due(self, steps_done: int) -> bool:
        """Whether to roll back now."""
        return self.guard.is_due(steps_done)

    @property
    def in_trouble(self) -> bool:
        """Whether to roll back where no step follows."""
        return self.guard.trouble is not None

    def limits(self, step: int) -> tuple[Limits, Limits]:
        """By which a step will be judged, and those that the device gets."""
        limits = self.guard.limits(step)
        return limits, limits if self.guard.leaves_out else NO_LIMITS

    def learning_rate(self, step: int) -> float:
        """The schedule's, lowered after a rollback."""
        return self.trainer.learning_rate(step) * self.guard.rate_factor(step)

    def after_step(self, done: StepDone) -> None:
        """Take the result of a step, in order. LlmqError where the run is hopeless."""
        step, result, limits = done.step, done.result, done.limits
        guard, in_row = self.guard, self.guard.in_row
        judgement = guard.judge(step, result, limits)
        self.checkpoints.judge(step, judgement)
        if not judgement.bad and in_row:
            self.reporter.guard(step, "good", f"Step {step} is good again, after {in_row} bad ones")
        if judgement.bad:
            skipped = judgement.left_out or not math.isfinite(result.norm)
            shown = not skipped and (guard.in_row <= SHOWN or guard.in_row % 10 == 0)
            text = f"WARNING: step {step} is bad: {judgement.reason}"
            given = {"limit_loss": limits.loss, "limit_norm": limits.norm}
            action = "skip" if skipped else "warn"
            self.reporter.guard(step, action, text, shown=shown, **given)
            if not skipped and guard.accepts_new_level():
                text = f"WARNING: {NEW_LEVEL} bad steps in a row: what is usual is measured anew"
                self.reporter.guard(step, "level", text)
        left_out = judgement.reason if judgement.left_out else None
        of_step = (step, done.ticket, result, guard.unchanged)
        self.update_check.check(*of_step, left_out, may_end=guard.mode != "rollback")

    def state(self) -> dict[str, Any]:
        return {"guard": self.guard.state}

    def begin(self, checkpoint: Path) -> None:
        """Go on with what is known of the run that it was loaded from."""
        history = self.trainer.history
        try:
            self.guard.load(history.get("guard", {}))
            self._events.load(history)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise LlmqError(
                f"'{checkpoint}' is none of llmq's: its history is not as llmq writes it "
                f"({error}); use another checkpoint"
            ) from error
        self.reporter.total_steps = self.trainer.total_steps
        self.checkpoints.resume(self.trainer.steps_done)
        # A rollback goes back to this if nothing else is there.
        foreign = checkpoint.parent.resolve() != self.trainer.config.checkpoint_dir.resolve()
        if foreign or "guard" not in history:
            self.guard.origin = str(checkpoint.absolute())

    def roll_back(self) -> None:
        """Go back to the newest good checkpoint, and on from there with the data that come next.

        LlmqError if that has not helped.
        """
        trainer, guard = self.trainer, self.guard
        bad, before = guard.trouble, trainer.steps_done
        self.checkpoints.finish()
        path = self.checkpoints.newest_good(bad)
        if path is None and guard.origin is not None:
            path = Path(guard.origin)
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
            trainer.load(path, new_data=True)  # the data stay where they are
            trainer.run = run
        guard.went_back(to, before)
        self.checkpoints.resume(to)
        self._events.load(trainer.history)  # not the guard's: it knows more than its checkpoint
        self.reporter.total_steps = trainer.total_steps

    def at_end(self, step: int) -> None:
        """Name what has not moved, and bad steps at the end."""
        for line in not_moved(self.trainer.ranks) if step else ():
            self.reporter.message(f"WARNING: {line}", step)
        if self.guard.in_row:
            last = f"WARNING: the last {self.guard.in_row} steps were bad, up to step {step - 1}"
            self.reporter.message(f"{last}: the model is hardly what it should be", step)


class FinalModel(Member):
    """Writes the model at the end of a run, if it computes finite numbers."""

    def __init__(self, judging: Judging, evaluations: Evaluations):
        self._judging, self._evaluations = judging, evaluations

    def at_end(self, step: int) -> None:
        """ModelError where it is spoiled, as its checkpoint is then."""
        trainer, reporter = self._judging.trainer, self._judging.reporter
        try:
            self._check(step)
            with reporter.section(f"Saving model to `{trainer.config.out_dir}`", step):
                trainer.export()
        except ModelError as error:
            self._judging.checkpoints.condemn(step, str(error))
            raise

    def _check(self, step: int) -> None:
        """ModelError where the model computes no finite numbers, unless --force."""
        config, guard = self._judging.trainer.config, self._judging.guard
        problem = self._evaluations.not_finite or guard.not_finite
        if problem is not None and not config.force:
            raise ModelError(
                f"no model is written, because {problem}: '{config.out_dir}' stays as it is; go on "
                "from a good checkpoint (--continue), or write the model all the same with --force"
            )
        if problem is not None:
            message = f"{problem}; the model is written (--force)"
            self._judging.reporter.message(f"WARNING: {message}", step)
