"""The verdicts on the steps of a run, which goes back where too many are bad, and the model that
the run writes at its end."""

import math
from pathlib import Path
from typing import Any

from llmq.base.dtypes import NO_LIMITS, Limits
from llmq.base.errors import LlmqError, ModelError
from llmq.checkpoint.folder import checkpoint_path, problem_of
from llmq.checkpoint.store import checkpoint_step
from llmq.run.checkpoints import Checkpoints
from llmq.run.diagnose import check_update, not_moved
from llmq.run.evaluations import Evaluations
from llmq.run.events import Events, Member, StepDone
from llmq.run.guard import NEW_LEVEL, ROLLBACKS, Guard
from llmq.run.metrics import Reporter
from llmq.run.trainer import Trainer

SHOWN = 3  # bad steps in a row whose lines are shown; then every tenth


class Judging(Member):
    """Judges steps, goes back where too many are bad, and writes the model at the end of a run."""

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        guard: Guard,
        checkpoints: Checkpoints,
        evaluations: Evaluations,
        events: Events,
    ):
        """events: members whose state a rollback and a resume bring back."""
        self.trainer, self.reporter, self.guard = trainer, reporter, guard
        self.checkpoints, self._evaluations = checkpoints, evaluations
        self._events = events

    def limits(self, step: int) -> tuple[Limits, Limits]:
        """Limits that judge a step, and limits that the device gets."""
        limits = self.guard.limits(step)
        return limits, limits if self.guard.leaves_out else NO_LIMITS

    def learning_rate(self, step: int) -> float:
        """The schedule's learning rate, lowered after a rollback."""
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
        check_update(self.trainer.ranks, self.reporter, done, guard, left_out)

    def state(self) -> dict[str, Any]:
        return {"guard": self.guard.state}

    def begin(self, checkpoint: Path) -> None:
        """Go on with the history of the run that wrote the checkpoint."""
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

    def _place_to_return(self, bad: int) -> Path | None:
        """The checkpoint that a rollback from this step returns to, of the same stage; None: the
        beginning of the run. LlmqError where a later stage has none."""
        path, origin = self.checkpoints.newest_good(bad), self.guard.origin
        first = self.checkpoints.first
        if path is None and origin is not None and checkpoint_step(Path(origin)) >= first:
            path = Path(origin)
        if path is None and first > 0:
            raise LlmqError(
                f"--guard rollback: step {bad} was the last of too many bad ones, and no good "
                f"checkpoint is left of the stage with this --seq-len, from step {first} "
                "on: go on from an older one with --continue STEP and a lower --learning-rate"
            )
        return path

    def roll_back(self) -> None:
        """Go back to the newest good checkpoint of the stage, and on from there with the data that
        come next.

        LlmqError if that has not helped.
        """
        trainer, guard = self.trainer, self.guard
        bad, before = guard.trouble, trainer.steps_done
        self.checkpoints.finish()
        path = self._place_to_return(bad)
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
        self._events.load(trainer.history)  # not the guard's: it knows more than its checkpoint
        self.checkpoints.resume(to)
        self.reporter.total_steps = trainer.total_steps

    @property
    def stop(self) -> str | None:
        """The reason of an early stop, as one line for the log; None: the run goes on."""
        why, steps = self.checkpoints.best.exhausted, self.trainer.steps_done
        return why and f"{why}, which ends the run after {steps} steps"

    def at_end(self, step: int) -> None:
        """Name parameters that have not moved, and bad steps at the end; write the best or the last
        model, if it computes finite numbers. ModelError where the last one is spoiled, as its
        checkpoint is then."""
        trainer, reporter, in_row = self.trainer, self.reporter, self.guard.in_row
        for line in not_moved(trainer.ranks) if step else ():
            reporter.message(f"WARNING: {line}", step)
        if in_row:
            last = f"WARNING: the last {in_row} steps were bad, up to step {step - 1}"
            reporter.message(f"{last}: the model is hardly what it should be", step)
        config, best = trainer.config, self.checkpoints.best
        exported = step if best.step is None or config.export == "last" else best.step
        try:
            self._check_model(step, exported)
            with reporter.section(f"Saving model to `{config.out_dir}`", step):
                trainer.export(checkpoint=None if exported == step else self._best_checkpoint())
        except ModelError as error:
            self.checkpoints.condemn(exported, str(error))
            raise
        if best.metric is not None:
            found = "none was found" if best.known is None else str(best)
            which = "best" if exported == best.step else "last"
            text = f"Exported: the {which} model, of step {exported} of {step}; best: {found}"
            reporter.message(text, step)

    def _best_checkpoint(self) -> Path:
        """The checkpoint of the best step; LlmqError where it is not whole."""
        directory, step = self.trainer.config.checkpoint_dir, self.checkpoints.best.step
        path = checkpoint_path(directory, step)
        problem = problem_of(path, self.trainer.world)
        if problem is not None:
            raise LlmqError(f"--export best: {problem}, or --continue --export last")
        return path

    def _check_model(self, step: int, exported: int) -> None:
        """ModelError where the model of the last step, if that is exported, computes no finite
        numbers, unless --force."""
        config, problem = self.trainer.config, self._evaluations.not_finite or self.guard.not_finite
        if problem is None:
            return
        if exported != step:
            self.checkpoints.condemn(step, problem)
            self.reporter.message(f"WARNING: {problem}: the model of step {step} is spoiled", step)
            return
        if not config.force:
            raise ModelError(
                f"no model is written, because {problem}: '{config.out_dir}' stays as it is; go on "
                "from a good checkpoint (--continue), or write the model all the same with --force"
            )
        self.reporter.message(f"WARNING: {problem}; the model is written (--force)", step)
