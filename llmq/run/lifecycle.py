"""The checkpoints of a run: saving, verdicts on checkpoints, deletion, the best checkpoint,
rollback and export.

`llmq/checkpoint/states.py` defines the states of checkpoints and the rules for keeping checkpoints,
which this module carries out. With --ckpt-background a thread writes and deletes (saving.py), and
the loop calls `poll` between steps. A verdict, or the choice of a checkpoint as the best, is
written once the checkpoint is complete.
"""

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from llmq.base.errors import DiskError, LlmqError, ModelError, warn
from llmq.base.run_id import RunId
from llmq.checkpoint.best import Best, Measured
from llmq.checkpoint.folder import checkpoint_path, forget_pages, problem_of
from llmq.checkpoint.states import (
    Checkpoint,
    Keep,
    NoCheckpoint,
    Proving,
    Verdict,
    find_checkpoint,
    kept_checkpoints,
    newest_good,
    outdated,
    write_verdict,
)
from llmq.checkpoint.store import checkpoint_step, delete_old, own_checkpoints
from llmq.options.option_types import NEWEST
from llmq.options.options import TrainConfig
from llmq.run.guard import PERSISTS, Guard
from llmq.run.metrics import Reporter
from llmq.run.run_paths import move_aside, undone_checkpoints
from llmq.run.saving import BackgroundWriter, Tidied, Written
from llmq.run.trainer import Trainer
from llmq.runtime.world import World

MISSING = 3  # least number of failed saves in a row that raises an alarm
SHORT_WAIT = 0.5  # longest unreported wait for the previous checkpoint, in seconds


class Lifecycle:
    """Saves the checkpoints of a run, judges them, deletes old ones, and exports the model.

    best: the best checkpoint so far. keep: the rule by which old checkpoints stay. saved_at: step
    of the newest complete checkpoint. writing: step of the checkpoint that is being written in the
    background. write_seconds: duration of the newest background save. late: True if a checkpoint
    waits for the first good step. All processes make the same calls.
    """

    def __init__(self, trainer: Trainer, reporter: Reporter, best: Best, guard: Guard, first: int):
        """first: the stage's first step; all sequences of a stage have one length."""
        self.trainer, self.reporter, self.best, self.guard = trainer, reporter, best, guard
        self.config, self.world = trainer.config, trainer.world
        self.keep = Keep.of(trainer.config, first)
        self._writer = BackgroundWriter(trainer.ranks, self.config.checkpoint_dir)
        self._proving = Proving()
        self.saved_at: int | None = None
        self.late = False
        self.writing: int | None = None
        self.write_seconds = 0.0
        self._verdict: Verdict | None = None  # verdict on the checkpoint that is being written
        self._unclean = False  # True if old checkpoints must still be deleted
        self._missing = 0  # number of failed saves since the newest checkpoint
        self._told = False  # True once a wait for a checkpoint was reported

    # -- going on --------------------------------------------------------------------------------

    @staticmethod
    def resume_from(config: TrainConfig, world: World) -> Path | None:
        """Return the checkpoint that --continue names. Returns None without --continue, or if the
        user wants the newest checkpoint and none exists. All processes call this function."""
        directory, wanted = config.checkpoint_dir, config.continue_from
        if wanted is None:
            return None
        passed: list[str] = []
        found = find_checkpoint(directory, wanted, passed, world)
        warn(*(f"--continue: {line}" for line in passed))
        if found is None:
            if wanted != NEWEST:
                raise NoCheckpoint(directory, wanted)
            problem = f"no complete checkpoint in '{directory}'"
            warn(f"--continue: {problem}, starting from the beginning")
        return found

    def state(self) -> dict[str, Any]:
        """Return the best checkpoint and the count of measurements since then, as JSON values."""
        return {} if self.best.metric is None else {"best": self.best.state()}

    def load(self, history: Mapping[str, Any]) -> None:
        """Restore a result of `state`; the caller must then call `resume`."""
        self.best.load(history.get("best"))

    def resume(self) -> None:
        """Restore the verdicts and the best checkpoint as of the trainer's step. The trainer has
        loaded a checkpoint of this step, from any directory."""
        step = self.trainer.steps_done
        self.saved_at, self.late = step, False
        self._proving = Proving()
        for at, checkpoint in self._kept().items():
            verdict = checkpoint.verdict
            if at <= step and (verdict is None or not verdict.good):
                self._proving.add(at, verdict)
        try:
            self.best.resume(self.trainer.run, step)
        except DiskError as error:
            self.reporter.message(f"WARNING: {error}", step)

    def move_undone_aside(self) -> None:
        """Rename this run's checkpoints of later steps; the run will make these steps again."""
        step = self.trainer.steps_done
        if step < self.trainer.total_steps:
            undone = partial(undone_checkpoints, self.config, self.trainer.run, step)
            for line in self.world.on_first(lambda: move_aside(undone())):
                self.reporter.message(line, step)

    def rollback_target(self, last: int) -> Path | None:
        """Return the checkpoint to load in a rollback from step `last`, of the same stage; None:
        the first weights. Raises LlmqError if a stage after the first has no good checkpoint."""
        path, origin = newest_good(self._kept(), self.keep, last, self.world), self.guard.origin
        first = self.keep.first
        if path is None and origin is not None and checkpoint_step(Path(origin)) >= first:
            path = Path(origin)
        if path is None and first > 0:
            raise LlmqError(
                f"--guard rollback: step {last} was the last of too many bad ones, and no good "
                f"checkpoint is left of the stage with this --seq-len, from step {first} "
                "on: go on from an older one with --continue STEP and a lower --learning-rate"
            )
        return path

    def _kept(self) -> dict[int, Checkpoint]:
        where = (self.config.checkpoint_dir, self.trainer.run)
        return self.world.on_first(lambda: kept_checkpoints(*where))

    # -- saving ----------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is due before this step: by --ckpt-interval, or because an
        earlier checkpoint waits for a good step and the last step was good."""
        interval = self.config.ckpt_interval
        return (interval > 0 and step % interval == 0) or (self.late and self.guard.in_row == 0)

    def save(self, *, required: bool = False, asked: bool = False) -> None:
        """Save a checkpoint, unless this step has one, and delete old checkpoints. After a bad step
        the weights may be spoiled, and a save needs `required` or `asked`. required: True to wait
        until the checkpoint is complete, and raise DiskError if saving fails; if False, a failure
        is only reported. asked: True if the user asks for this checkpoint."""
        if required:
            self.finish()
        if self.trainer.steps_done not in (self.saved_at, self.writing):
            self._save(required=required, asked=asked)
        if self.writing is None:
            self._settle_best(self.trainer.steps_done)

    def _save(self, *, required: bool, asked: bool) -> None:
        config, step = self.config, self.trainer.steps_done
        if self.guard.in_row and not (required or asked):
            if not self.late:
                self.reporter.message(
                    f"No checkpoint of step {step} as long as steps are bad: the next good step "
                    "brings one",
                    step,
                )
            self.late = True
            return
        self._wait(step)
        self.late = False
        text = f"saving checkpoint to `{config.checkpoint_dir}`"
        if config.ckpt_background and not required:
            self.reporter.message(f"{text} in the background", step)
            self.writing, self._verdict = step, None
            self._writer.save(step, self.trainer.manifest(), self._tidying(step))
            self._unclean = False
            self._prove(step)
            return
        try:
            with self.reporter.section(text, step):
                self.trainer.save()
        except DiskError as error:
            if required:
                raise
            self._lost(step, error)
            return
        self._complete(step)
        self._prove(step)
        self._take_tidied(self._tidying(step)(self.world))

    def _prove(self, step: int) -> None:
        """Let the next steps decide whether this checkpoint is good. After PERSISTS bad steps in a
        row, mark the checkpoint as spoiled at once."""
        if self.guard.in_row >= PERSISTS:
            text = f"the last {self.guard.in_row} steps were bad"
            self._note(step, Verdict.spoiled(text))
        else:
            self._proving.add(step)

    def _complete(self, step: int) -> None:
        self.saved_at, self._missing = step, 0
        self.reporter.alarm(None)

    def _lost(self, step: int, error: DiskError) -> None:
        """Report a failed save. MISSING failures in a row raise an alarm, --ckpt-required failures
        in a row raise DiskError."""
        now = self.trainer.steps_done
        self._missing += 1
        self.reporter.message(f"WARNING: no checkpoint of step {step}: {error}", now)
        newest = "none" if self.saved_at is None else f"that of step {self.saved_at}"
        text = f"{self._missing} checkpoints in a row could not be written, the newest is {newest}"
        if 0 < self.config.ckpt_required <= self._missing:
            ended = DiskError(f"--ckpt-required: {text}: {error}")
            ended.agreed = True  # all processes raise the same error
            raise ended
        if self._missing >= MISSING:
            self.reporter.alarm(f"{text}: {error}", now)

    # -- in the background -----------------------------------------------------------------------

    def poll(self, *, wait: bool = False) -> None:
        """Take the result of the writing thread, if the thread has ended. wait: True to wait for
        the end first."""
        while (written := self._writer.ended(wait=wait)) is not None:
            self._take(written)

    def finish(self) -> None:
        """Wait until no checkpoint is being written, then delete old checkpoints."""
        self.poll(wait=True)
        if self._unclean:
            self._delete_old()

    def _wait(self, step: int) -> None:
        """Wait until the previous checkpoint is written. Only the first long wait of a run is
        reported."""
        before, start = self.writing, time.monotonic()
        self.poll(wait=True)
        waited = self.world.share(time.monotonic() - start)
        if before is not None and waited > SHORT_WAIT and not self._told:
            self._told = True
            self.reporter.message(
                f"WARNING: step {step} has waited {waited:.1f} s for the checkpoint of step "
                f"{before}, which took {self.write_seconds:.1f} s: with more steps between two "
                "checkpoints, or a faster disk, training would not wait",
                step,
            )

    def _take(self, written: Written) -> None:
        """Take a result of the writing thread: a complete checkpoint, or a failed save."""
        step, tidied, self.write_seconds = written
        verdict, self._verdict, self.writing = self._verdict, None, None
        if isinstance(tidied, DiskError):
            self._settle_best(step)
            self._proving.lose(step)
            self._lost(step, tidied)
            return
        self._complete(step)
        text = f"The checkpoint of step {step} was written in {self.write_seconds:.1f} s"
        self.reporter.message(text, self.trainer.steps_done)
        self.trainer.tell_checkpoint(checkpoint_path(self.config.checkpoint_dir, step))
        if verdict is not None:
            self._note(step, verdict)
        self._take_tidied(tidied)
        self._settle_best(step)

    def close(self, *, give_up: bool) -> None:
        """Stop the writing thread, before the memory that the thread reads is freed. give_up: True
        to discard the unfinished checkpoint; if False, a run of a single process completes the
        checkpoint."""
        self._writer.stop(give_up=give_up)
        if not (self.world.several or give_up):
            with suppress(Exception):  # a failed device would raise its error again
                self.poll(wait=True)

    # -- the best --------------------------------------------------------------------------------

    def measured(self, measured: Measured) -> bool:
        """Take the metrics of an evaluation after the newest step. Returns True if the metric of
        --keep-best is the best so far; the caller then calls `save`, which keeps the checkpoint as
        the best."""
        if self.best.metric not in measured:
            return False
        if self.best.proposed is not None:  # the previous best checkpoint is still being written
            self.poll(wait=True)
        line = self.best.begins_anew(measured)
        if line is not None:
            self.reporter.message(line, self.trainer.steps_done)
        return self.best.take(self.trainer.steps_done, measured)

    def _settle_best(self, step: int | None) -> None:
        """Make this step's checkpoint the best if it was proposed as the best and is complete; drop
        the proposal if the checkpoint failed."""
        best, now = self.best, self.trainer.steps_done
        if best.proposed is None or best.proposed.step != step:
            return
        if self.saved_at != step:
            best.drop()
            return
        try:
            best.accept(self.trainer.run)
        except DiskError as error:
            self.reporter.message(f"WARNING: {error}", now)
        self.reporter.message(f"Best so far: {best}", now)
        self._let_go()

    # -- verdicts --------------------------------------------------------------------------------

    def verdict(self, step: int, bad: str | None) -> None:
        """Apply a step's verdict to the checkpoints before the step; steps come in order. bad: why
        the step is bad; None for a good step."""
        level = self.guard.level
        if bad is None:
            verdicts = self._proving.mark_good(step, self.guard.last_bad, level)
        else:
            verdicts = self._proving.mark_suspect(step, bad, level)
        for at, verdict in verdicts.items():
            self._note(at, verdict)
        if verdicts and bad is None:
            self._let_go()

    def condemn(self, step: int, reason: str) -> None:
        """Mark this step's checkpoint as spoiled, unless later steps have proved it good."""
        if self._proving.drop(step):
            self._note(step, Verdict.spoiled(reason))

    def _note(self, step: int, verdict: Verdict) -> None:
        """Write a verdict into the checkpoint of this step, or keep the verdict until the
        checkpoint is complete."""
        if step == self.writing:
            self._verdict = verdict
            return
        if not self.world.first:
            return
        path = own_checkpoints(self.config.checkpoint_dir, self.trainer.run).get(step)
        try:
            if path is not None:  # None if the checkpoint was removed or replaced
                write_verdict(path, verdict)
        except DiskError as error:
            if path.is_dir():  # no folder: a thread has just deleted the checkpoint
                self.reporter.message(f"WARNING: {error}", self.trainer.steps_done)

    # -- old ones --------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Delete checkpoints that are superfluous after a verdict or a new best checkpoint. With
        --ckpt-background the next save deletes the checkpoints, so that training does not wait."""
        self._unclean = self.config.ckpt_background
        if not self._unclean:
            self._delete_old()

    def _delete_old(self) -> None:
        """Delete old checkpoints at once."""
        self._unclean = False
        if self.saved_at is not None:
            tidying = self._tidying(self.saved_at, read_back=False)
            self._take_tidied(tidying(self.world))

    def _tidying(self, saved_at: int, *, read_back: bool = True) -> partial[Tidied]:
        """Return a prepared call of `tidy` that keeps the checkpoint of step saved_at."""
        spared = [at for at in (self.best.step, self._proving.followed) if at is not None]
        where = (self.config.checkpoint_dir, self.trainer.run)
        return partial(tidy, *where, self.keep, saved_at, spared, read_back=read_back)

    def _take_tidied(self, tidied: Tidied) -> None:
        """Report deleted checkpoints; mark the newest checkpoint as spoiled if it could not be read
        back."""
        now, saved_at = self.trainer.steps_done, self.saved_at
        if tidied.removed:
            self.reporter.message(f"Cleaned {tidied.removed} checkpoints", now)
        if tidied.problem is not None:
            self._proving.drop(saved_at)
            self._note(saved_at, Verdict.spoiled(f"it could not be read back: {tidied.problem}"))
            self.saved_at = None
            self.reporter.message(
                f"WARNING: the checkpoint of step {saved_at} could not be read back, older ones "
                f"stay: {tidied.problem}",
                now,
            )

    # -- export ----------------------------------------------------------------------------------

    def export(self, problem: str | None) -> None:
        """Write the best or the last model (--export). Raises ModelError if this model does not
        compute finite numbers, and marks its checkpoint as spoiled. problem: why the last model
        does not compute finite numbers, or None."""
        config, best, step = self.config, self.best, self.trainer.steps_done
        exported = step if best.step is None or config.export == "last" else best.step
        source = None
        if exported != step:
            source = checkpoint_path(config.checkpoint_dir, exported)
            damage = problem_of(source, self.world)
            if damage is not None:
                raise LlmqError(f"--export best: {damage}, or --continue --export last")
        try:
            if problem is not None:
                self._spoiled(problem, exported)
            with self.reporter.section(f"Saving model to `{config.out_dir}`", step):
                self.trainer.export(checkpoint=source)
        except ModelError as error:
            self.condemn(exported, str(error))
            raise
        if best.metric is not None:
            found = "none was found" if best.known is None else str(best)
            which = "best" if exported == best.step else "last"
            text = f"Exported: the {which} model, of step {exported} of {step}; best: {found}"
            self.reporter.message(text, step)

    def _spoiled(self, problem: str, exported: int) -> None:
        """Report a last model that does not compute finite numbers. Raises ModelError if the last
        model is to be exported, unless --force is given. exported: step of the model to export."""
        step = self.trainer.steps_done
        if exported != step:
            self.condemn(step, problem)
            self.reporter.message(f"WARNING: {problem}: the model of step {step} is spoiled", step)
        elif self.config.force:
            self.reporter.message(f"WARNING: {problem}; the model is written (--force)", step)
        else:
            raise ModelError(
                f"no model is written, because {problem}: '{self.config.out_dir}' stays as it is; "
                "go on from a good checkpoint (--continue), or write the model all the same with "
                "--force"
            )


def tidy(
    directory: Path,
    run: RunId,
    keep: Keep,
    saved_at: int,
    spared: Collection[int],
    world: World,
    *,
    read_back: bool,
) -> Tidied:
    """Delete old checkpoints. saved_at: step of the newest checkpoint. spared: further steps whose
    checkpoints stay. read_back: True to first read the newest checkpoint from the disk, and delete
    nothing if it is damaged. All processes of the world call this function."""
    if read_back and keep.newest > 0:
        path = checkpoint_path(directory, saved_at)
        forget_pages(path)
        problem = problem_of(path, world)
        if problem is not None:
            return Tidied(0, problem)

    def delete() -> int:
        found = kept_checkpoints(directory, run) if keep.newest > 0 else {}
        return len(delete_old(directory, run, outdated(found, keep, saved_at, spared)))

    return Tidied(world.on_first(delete))
