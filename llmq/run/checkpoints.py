"""The checkpoints of a run: when one is written, which are good, which is the best, which stay.

With --ckpt-background a thread writes and deletes (see saving.py), and the consequences are taken
between steps: verdicts and the note of the best checkpoint wait until a checkpoint is committed.
"""

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from llmq.base.errors import DiskError
from llmq.base.run_id import RunId
from llmq.checkpoint.best import Best, Measured
from llmq.checkpoint.folder import checkpoint_path, forget_pages, problem_of
from llmq.checkpoint.store import (
    Candidates,
    CheckpointInfo,
    Verdict,
    checkpoint_owner,
    delete_old,
    kept_checkpoints,
    outdated,
    write_verdict,
)
from llmq.options.options import TrainConfig
from llmq.run.events import Events, Member
from llmq.run.guard import PERSISTS, Guard, Judgement
from llmq.run.metrics import Reporter
from llmq.run.requests import Requests
from llmq.run.run_paths import move_aside, undone_checkpoints
from llmq.run.saving import BackgroundWriter, Clean, Cleaned, Written
from llmq.run.trainer import Trainer
from llmq.runtime.world import World

MISSING = 3  # checkpoints that could not be written, after which it is said so that all see it
SHORT_WAIT = 0.5  # seconds for the checkpoint before, of which nothing is said


class Checkpoints(Member):
    """Writes the checkpoints of a run, judges them, deletes old ones, and knows the best. saved_at:
    step of the newest with this state. writing: step of the one in the background. late: whether
    one waits for the first good step. All processes make the same calls."""

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        best: Best,
        guard: Guard,
        events: Events,
        requests: Requests,
        first: int,
    ):
        """events: members whose state each checkpoint keeps. requests: requests for checkpoints.
        first: first step of the stage, which has sequences of one length."""
        self.trainer, self.reporter, self.best, self.guard = trainer, reporter, best, guard
        self.config, self.first = trainer.config, first
        self._events, self._requests = events, requests
        self._writer = BackgroundWriter(trainer.ranks, self.config.checkpoint_dir)
        self._candidates = Candidates()
        self.saved_at: int | None = None
        self._unread: Path | None = None  # the newest one, until it was read back
        self.late = False
        self.writing: int | None = None
        self._verdict: Verdict | None = None  # of the one that is being written
        self._missing = 0  # how many could not be written since the newest one
        self._unclean = self._told = False  # whether old ones wait; whether of waiting was told

    def resume(self, step: int) -> None:
        """Go on with what is known of a run whose checkpoint of this step was loaded from whatever
        directory."""
        self.saved_at, self.late, self._unread = step, False, None
        self._candidates = Candidates()
        for at, (path, verdict, _) in self._kept().items():
            if at <= step and (verdict is None or not verdict.good):
                self._candidates.add(at, path, verdict)
        try:
            self.best.resume(self.trainer.run, self.trainer.steps_done)
        except DiskError as error:
            self.reporter.message(f"WARNING: {error}", step)

    def state(self) -> dict[str, Any]:
        return {} if self.best.metric is None else {"best": self.best.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.best.load(state.get("best"))

    def _kept(self) -> dict[int, CheckpointInfo]:
        where = (self.config.checkpoint_dir, self.trainer.run)
        return self.trainer.world.on_first(lambda: kept_checkpoints(*where))

    def newest_good(self, last: int) -> Path | None:
        """The newest whole checkpoint of the stage up to step `last`; None without one.

        Checkpoints of multiples of --ckpt-interval, which a run that was stopped and went on has,
        too, count if known to be good; the first one of a later stage unless known to be bad.
        """
        first, interval = self.first, self.config.ckpt_interval
        for step, (path, verdict, _) in sorted(self._kept().items(), reverse=True):
            if not first <= step <= last:
                continue
            if step == first > 0:
                good = verdict is None or verdict.good or verdict.level >= 0
            else:
                good = step % interval == 0 and verdict is not None and verdict.good
            if good and problem_of(path, self.trainer.world) is None:
                return path
        return None

    # -- when ------------------------------------------------------------------------------------

    def before_steps(self, step: int) -> None:
        """Move aside what a run has left that is continued from before its end."""
        if step < self.trainer.total_steps:
            where = (self.config, self.trainer.run, step)
            for line in self.trainer.world.on_first(lambda: move_aside(undone_checkpoints(*where))):
                self.reporter.message(line, step)

    def before_step(self, step: int, *, new_epoch: bool) -> None:
        self.poll()
        interval, asked = self.config.ckpt_interval, self._requests.asked
        due = interval > 0 and step % interval == 0
        due |= self.late and self.guard.in_row == 0
        if asked is not None:
            self.reporter.message(f"A checkpoint, as {asked} asks for", step)
        if asked is not None or (step > self._events.first and due):
            self._save_between_steps(asked=asked is not None)

    def after_steps(self, step: int, *, last: bool) -> None:
        if not last:
            self.save_last()
        elif self.config.save_training_state:  # before the long evaluation at the end
            self._save_between_steps()

    def before_end(self, step: int) -> None:
        self.finish()  # whatever becomes of the export

    def at_end(self, step: int) -> None:
        if self.config.save_training_state:  # if there was no room before
            self._save_between_steps(required=True)

    def interrupted(self, step: int) -> None:
        self._save_between_steps(required=True)

    def save_last(self, *, required: bool = True) -> None:
        """The state that another stage, or another attempt, begins with."""
        self._save_between_steps(required=required)
        self.finish()

    def _save_between_steps(self, *, required: bool = False, asked: bool = False) -> None:
        """Save; how long it took is noted for the next one."""
        self._events.pause()
        start = time.monotonic()
        self.save(required=required, asked=asked)
        self._requests.save_took(time.monotonic() - start)

    # -- saving ----------------------------------------------------------------------------------

    def save(self, *, required: bool = False, asked: bool = False) -> None:
        """Write a checkpoint, if the newest is not of this step, and delete what is too old. After
        a bad step, which may have spoiled it, only if required or asked for. required: it is there
        afterwards, or DiskError is raised; else its failure is said."""
        config, step = self.config, self.trainer.steps_done
        if required:
            self.finish()
        if step in (self.saved_at, self.writing):
            return
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
        self.trainer.history = self._events.state()
        if config.ckpt_background and not required:
            self._begin(step)
            return
        try:
            with self.reporter.section(f"saving checkpoint to `{config.checkpoint_dir}`", step):
                path = self.trainer.save()
        except DiskError as error:
            if required:
                raise
            self._lost(step, error, step)
            return
        self.saved_at, self._unread, self._missing = step, path, 0
        self.reporter.alarm(None)
        self._opened(step, path)
        self._clean()
        if required:
            self.finish()

    def _lost(self, step: int, error: DiskError, now: int) -> None:
        """A checkpoint of this step could not be written: say so, in a way that nobody overlooks
        after MISSING in a row. DiskError after --ckpt-required of them."""
        self._missing += 1
        self.reporter.message(f"WARNING: no checkpoint of step {step}: {error}", now)
        newest = "none" if self.saved_at is None else f"that of step {self.saved_at}"
        text = f"{self._missing} checkpoints in a row could not be written, the newest is {newest}"
        if 0 < self.config.ckpt_required <= self._missing:
            ended = DiskError(f"--ckpt-required: {text}: {error}")
            ended.agreed = True  # by all processes
            raise ended
        if self._missing >= MISSING:
            self.reporter.alarm(f"{text}: {error}", now)

    def _opened(self, step: int, path: Path) -> None:
        """From now on steps are judged for this checkpoint."""
        if self.guard.in_row >= PERSISTS:
            self._note(path, Verdict(False, 0, f"the last {self.guard.in_row} steps were bad", -1))
        else:
            self._candidates.add(step, path)

    # -- in the background -----------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        """Begin to write a checkpoint of this step, which is deleted no more than in `save`."""
        where = self.config.checkpoint_dir
        self.reporter.message(f"saving checkpoint to `{where}` in the background", step)
        self.writing, self._verdict = step, None
        path = checkpoint_path(where, step)
        self._writer.save(step, self.trainer.manifest(), self._cleaning(step, path))
        self._opened(step, path)

    def poll(self) -> None:
        """Between two steps: take what has become of what is being written."""
        written = self._writer.ended()
        if written is not None:
            self._take(written)

    def finish(self) -> None:
        """As `poll`, until nothing is being written any more."""
        while self._writer.busy:
            self._take(self._writer.ended(wait=True))

    def _wait(self, step: int) -> None:
        """Until the checkpoint before is written; that training waits for it is said once."""
        if not self._writer.busy:
            return
        before, start = self.writing, time.monotonic()
        written = self._writer.ended(wait=True)
        self._take(written)
        self.finish()  # with old ones, which may be deleted now
        waited = self.trainer.world.share(time.monotonic() - start)
        if before is not None and waited > SHORT_WAIT and not self._told:
            self._told = True
            self.reporter.message(
                f"WARNING: step {step} has waited {waited:.1f} s for the checkpoint of step "
                f"{before}, which took {written.seconds:.1f} s: with more steps between two "
                "checkpoints, or a faster disk, training would not wait",
                step,
            )

    def _take(self, written: Written) -> None:
        """Do what follows from what the thread has done."""
        step, path, error, cleaned, seconds = written
        if step is None:
            self._take_cleaned(self.saved_at, self._unread, cleaned)
            if self._unclean:
                self._clean()
            return
        verdict, self._verdict, self.writing = self._verdict, None, None
        self._requests.write_took(seconds)
        now = self.trainer.steps_done
        if error is not None:
            self.best.drop()
            self._candidates.lose(step)
            self._lost(step, error, now)
            return
        self._missing = 0
        self.reporter.alarm(None)
        text = f"The checkpoint of step {step} was written in {seconds:.1f} s"
        self.reporter.message(text, now)
        if verdict is not None:
            self._note(path, verdict)
        self._take_cleaned(step, path, cleaned)
        if self.best.proposed is not None:
            self._accept_best()
        elif self._unclean:
            self._clean()

    def close(self, *, give_up: bool) -> None:
        """Before the memory is freed that is read from; after an error, or with nothing to do.

        give_up: what is being written; else it is finished, where this process can do that alone.
        """
        self._writer.stop(give_up=give_up)
        if not (self.trainer.world.several or give_up):
            with suppress(Exception):  # there is a first error, and a failed device repeats it
                self.finish()

    # -- the best --------------------------------------------------------------------------------

    def measured(self, step: int, measured: Measured) -> None:
        """Write a checkpoint of this step, too, if its metric of --keep-best is the best so far."""
        if self.best.metric not in measured:
            return
        if self.best.proposed is not None:  # then the best so far is not accepted yet
            self.finish()
        line = self.best.begins_anew(measured)
        if line is not None:
            self.reporter.message(line, step)
        if not self.best.take(step, measured):
            return
        self.save()
        if self.writing != step:
            self._accept_best()

    def _accept_best(self) -> None:
        """Take the proposed best, if its checkpoint is there: the disk may be full."""
        now = self.trainer.steps_done
        if self.saved_at != self.best.proposed.step:
            self.best.drop()
            return
        try:
            self.best.accept(self.trainer.run)
        except DiskError as error:
            self.reporter.message(f"WARNING: {error}", now)
        self.reporter.message(f"Best so far: {self.best}", now)
        self._clean()

    # -- verdicts --------------------------------------------------------------------------------

    def judge(self, step: int, judgement: Judgement) -> None:
        """Take what is known of a step, in order: what it says of the checkpoints before it."""
        level = self.guard.level
        if judgement.bad:
            for path, verdict in self._candidates.after_bad(step, judgement.reason, level):
                self._note(path, verdict)
            return
        known = self._candidates.after_good(step, self.guard.last_bad, level)
        for path, verdict in known.items():
            if verdict is not None:
                self._note(path, verdict)
        if known:
            self._clean()

    def condemn(self, step: int, reason: str) -> None:
        """The model of this step turns out to be spoiled: a checkpoint of it never becomes good."""
        path = self._candidates.drop(step)
        if path is not None:
            self._note(path, Verdict(False, 0, reason, level=-1))

    def _note(self, path: Path, verdict: Verdict) -> None:
        """Write a verdict, when its checkpoint is there; all processes have come to the same."""
        writing = self.writing
        if writing is not None and path == checkpoint_path(self.config.checkpoint_dir, writing):
            self._verdict = verdict
            return
        if not self.trainer.world.first:
            return
        try:
            mine = self.trainer.run.owns(checkpoint_owner(path))
            if mine and path.is_dir():  # else it was removed, or replaced
                write_verdict(path, verdict)
        except DiskError as error:
            if path.is_dir():  # else a thread has just deleted it
                self.reporter.message(f"WARNING: {error}", self.trainer.steps_done)

    # -- old ones --------------------------------------------------------------------------------

    def _clean(self) -> None:
        """Delete what is too old, when the newest was read back from the disk."""
        if self.saved_at is None:
            return
        cleaning = self._cleaning(self.saved_at, self._unread)
        self._unclean = self._writer.busy
        if not self.config.ckpt_background:
            self._take_cleaned(self.saved_at, self._unread, cleaning(self.trainer.world))
        elif not self._unclean:
            self._writer.clean(cleaning)

    def _cleaning(self, saved_at: int, unread: Path | None) -> Clean:
        """`clean` beside the checkpoint of this step, as far as is known now."""
        spared = [at for at in (self.best.step, self._candidates.followed) if at is not None]
        return partial(clean, self.config, self.trainer.run, self.first, saved_at, unread, spared)

    def _take_cleaned(self, saved_at: int, unread: Path | None, cleaned: Cleaned) -> None:
        """Do what follows from what was found by the cleaning beside this checkpoint."""
        step, (problem, removed, read) = self.trainer.steps_done, cleaned
        self.saved_at, self._unread = saved_at, None if read else unread
        if removed:
            self.reporter.message(f"Cleaned {removed} checkpoints", step)
        if problem is not None:
            self._candidates.drop(saved_at)
            self._note(unread, Verdict(False, 0, f"it could not be read back: {problem}", -1))
            self.saved_at = None
            self.reporter.message(
                f"WARNING: the checkpoint of step {saved_at} could not be read back, older ones "
                f"stay: {problem}",
                step,
            )


def clean(
    config: TrainConfig,
    run: RunId,
    first: int,
    saved_at: int,
    unread: Path | None,
    spared: Collection[int],
    world: World,
) -> Cleaned:
    """Delete old checkpoints, if the checkpoint of step saved_at is whole.

    first: first step of the stage. unread: path of the checkpoint of saved_at, if still to be read
    back. spared: steps whose checkpoints stay. All processes of the world call this function.
    """
    directory = config.checkpoint_dir

    def old() -> list[int]:
        if config.ckpt_keep_n <= 0:
            return []
        found = kept_checkpoints(directory, run)
        keep = (config.ckpt_keep_n, config.ckpt_major, saved_at)
        interval = config.ckpt_interval if config.guard == "rollback" else 0
        return outdated(found, *keep, spared=spared, interval=interval, first=first)

    gone = world.on_first(old)
    reads = unread is not None and bool(gone)
    if reads:
        forget_pages(unread)
        problem = problem_of(unread, world)
        if problem is not None:
            return Cleaned(problem, 0, reads)
    removed = world.on_first(lambda: delete_old(directory, run, gone))
    return Cleaned(None, len(removed), reads)
