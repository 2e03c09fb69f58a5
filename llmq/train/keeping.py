"""The checkpoints of a run: when one is written, which of them stay, which were good.

With --ckpt-background a thread writes and deletes (see saving.py), and what follows from it is
taken between steps: verdicts and the note of the best checkpoint wait until it is committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llmq.base.errors import DiskError
from llmq.checkpoint.best import Best, Found
from llmq.checkpoint.folder import checkpoint_path
from llmq.checkpoint.store import checkpoint_owner, kept_checkpoints
from llmq.checkpoint.verdict import PROVEN, Verdict, write_verdict
from llmq.runtime.processes import processes
from llmq.train.cleaning import Cleaned, Cleaning
from llmq.train.guard import PERSISTS, Guard, Judgement
from llmq.train.history import History
from llmq.train.metrics import Reporter
from llmq.train.saving import Done, Saver
from llmq.train.trainer import Trainer

SHORT_WAIT = 0.5  # seconds for the checkpoint before, of which nothing is said


class Keeping:
    """Writes checkpoints, deletes what is too old, and knows the best and the good ones.

    saved_at: step of the newest checkpoint that holds this state. writing: step of the one that is
    being written in the background. late: whether a checkpoint waits for the first good step.
    """

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        best: Best,
        guard: Guard,
        history: History,
        wrote: Callable[[float], None],
    ):
        """wrote: gets the seconds of each that was written in the background."""
        self.trainer, self.reporter, self.best, self.guard = trainer, reporter, best, guard
        self.config = trainer.config
        self._saver = Saver(trainer.ranks, self.config.checkpoint_dir)
        self._wrote = wrote
        self.saved_at: int | None = None
        self.writing: int | None = None
        self._verdict: Verdict | None = None  # of the one that is being written
        self._found: Found | None = None  # what makes it the best
        self._unclean = self._told = False  # whether old ones wait; whether of waiting was told
        self.late = False
        self._history = history
        self._unread: Path | None = None  # the newest checkpoint, until it was read back
        self._open: dict[int, Path] = {}  # by step those that may become good
        self._bad: dict[int, int] = {}  # of these, those that are bad so far, with their level
        self._followed: int | None = None  # step of the newest after which a step was good

    def went_to(self, step: int) -> None:
        """After loading the checkpoint of this step, of whatever directory."""
        self.saved_at, self.late, self._unread, self._followed = step, False, None, None
        self._open, self._bad = {}, {}
        where = (self.config.checkpoint_dir, self.trainer.run)
        known = processes().on_first(lambda: kept_checkpoints(*where))
        for at, (path, verdict, _) in known.items():
            if at <= step and (verdict is None or not verdict.good):
                self._open[at] = path
                if verdict is not None:
                    self._bad[at] = verdict.level
        self.resume_best()

    def save(self, *, required: bool = False, asked: bool = False) -> None:
        """Write a checkpoint, if the newest is not of this step, and delete what is too old.

        After a bad step only if it is required or asked for: it might hold what that one has
        spoiled. required: it is there afterwards, and DiskError is raised, because no other chance
        follows; else it may be written in the background, and its failure is said.
        """
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
        self.trainer.history = self._history.state()
        if config.ckpt_background and not required:
            self._begin(step)
            return
        try:
            with self.reporter.section(f"saving checkpoint to `{config.checkpoint_dir}`", step):
                path = self.trainer.save()
        except DiskError as error:
            if required:
                raise
            self.reporter.message(f"WARNING: no checkpoint of step {step}: {error}", step)
            return
        self.saved_at, self._unread = step, path
        self._opened(step, path)
        self._clean()
        if required:
            self.finish()

    def _opened(self, step: int, path: Path) -> None:
        """From now on steps are judged for this checkpoint."""
        if self.guard.in_row >= PERSISTS:
            self._note(path, Verdict(False, 0, f"the last {self.guard.in_row} steps were bad", -1))
        else:
            self._open[step] = path
            self._bad.pop(step, None)

    # -- in the background -----------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        """Begin to write a checkpoint of this step, which is deleted no more than in `save`."""
        where = self.config.checkpoint_dir
        self.reporter.message(f"saving checkpoint to `{where}` in the background", step)
        self.writing, self._verdict, self._found = step, None, None
        path = checkpoint_path(where, step)
        self._saver.save(step, self.trainer.manifest(), self._cleaning(step, path))
        self._opened(step, path)

    def look(self) -> None:
        """Between two steps, in all processes: take what has become of what is being written."""
        done = self._saver.ended()
        if done is not None:
            self._take(done)

    def finish(self) -> None:
        """As `look`, until nothing is being written any more."""
        while self._saver.busy:
            self._take(self._saver.ended(wait=True))

    def _wait(self, step: int) -> None:
        """Until the checkpoint before is written; that training waits for it is said once."""
        if not self._saver.busy:
            return
        before, start = self.writing, time.monotonic()
        done = self._saver.ended(wait=True)
        self._take(done)
        self.finish()  # with old ones, which may be deleted now
        waited = processes().share(time.monotonic() - start)
        if before is not None and waited > SHORT_WAIT and not self._told:
            self._told = True
            self.reporter.message(
                f"WARNING: step {step} has waited {waited:.1f} s for the checkpoint of step "
                f"{before}, which took {done.seconds:.1f} s: with more steps between two "
                "checkpoints, or a faster disk, training would not wait",
                step,
            )

    def _take(self, done: Done) -> None:
        """What follows from what the saver has done."""
        saved_at, unread = self.saved_at, self._unread
        if done.step is not None:
            verdict, found, self.writing = self._verdict, self._found, None
            self._verdict = self._found = None
            self._wrote(done.seconds)
            if done.error is not None:
                self._failed(done.step, done.error)
                return
            saved_at, unread = done.step, done.path
            self.reporter.message(
                f"The checkpoint of step {done.step} was written in {done.seconds:.1f} s",
                self.trainer.steps_done,
            )
            if verdict is not None:
                self._note(done.path, verdict)
        self._take_cleaned(saved_at, unread, done.cleaned)
        if done.step is not None and found is not None and self.saved_at == done.step:
            self._note_best(done.step, found)
        elif self._unclean:
            self._clean()

    def _failed(self, step: int, error: DiskError) -> None:
        self._open.pop(step, None)
        self._bad.pop(step, None)
        if self._followed == step:
            self._followed = max((at for at in self._open if at < step), default=None)
        text = f"WARNING: no checkpoint of step {step}: {error}"
        self.reporter.message(text, self.trainer.steps_done)

    def close(self, *, give_up: bool) -> None:
        """Before the memory is freed that is read from; after an error, or with nothing to do.

        give_up: what is being written; else it is finished, where this process can do that alone.
        """
        self._saver.stop(give_up=give_up)
        if processes().count == 1 and not give_up:
            with suppress(Exception):  # there is a first error, and a failed device repeats it
                self.finish()

    # -- the best --------------------------------------------------------------------------------

    def resume_best(self) -> None:
        """Take what an earlier part of the run has noted of the best checkpoint."""
        self.best.resume(self.trainer.run, self.trainer.steps_done)

    def keep_best(self, found: Found) -> None:
        """Write a checkpoint of this step, too, if it is the best so far. found: what is known."""
        step = self.trainer.steps_done
        if self._found is not None:  # then the best so far is not noted yet
            self.finish()
        if not self.best.improves(found):
            return
        self.save()
        if self.writing == step:
            self._found = found
        elif self.saved_at == step:  # else the disk is full
            self._note_best(step, found)

    def _note_best(self, step: int, found: Found) -> None:
        metric, now = self.best.metric, self.trainer.steps_done
        try:
            self.best.note(found, step, self.trainer.run)
        except DiskError as error:
            self.reporter.message(f"WARNING: {error}", now)
        self.reporter.message(f"Best so far: {metric} {found[metric][0]:.6g} at step {step}", now)
        self._clean()

    # -- what follows a checkpoint ---------------------------------------------------------------

    def judge(self, step: int, judgement: Judgement) -> None:
        """Take what is known of a step, in order: what it says of the checkpoints before it."""
        level, before = self.guard.level, [at for at in self._open if at <= step]
        if judgement.bad:
            for at in before:
                if at not in self._bad:
                    reason = f"step {step} was bad: {judgement.reason}"
                    self._note(self._open[at], Verdict(False, step - at, reason, level))
                    self._bad[at] = level
            return
        self._followed = max(before, default=self._followed)
        first = self.guard.last_bad + 1  # of the good steps up to this one
        known = [at for at in before if step - max(at, first) + 1 >= PROVEN]
        for at in known:
            path = self._open.pop(at)
            if self._bad.pop(at, level) == level:
                self._note(path, Verdict(True, PROVEN, level=level))
        if known:
            self._clean()

    def condemn(self, step: int, reason: str) -> None:
        """The model of this step turns out to be spoiled: a checkpoint of it never becomes good."""
        path = self._open.pop(step, None)
        if path is not None:
            self._bad.pop(step, None)
            self._note(path, Verdict(False, 0, reason, level=-1))

    def _note(self, path: Path, verdict: Verdict) -> None:
        """Write a verdict, when its checkpoint is there; all processes have come to the same."""
        writing = self.writing
        if writing is not None and path == checkpoint_path(self.config.checkpoint_dir, writing):
            self._verdict = verdict
            return
        if not processes().first:
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
        self._unclean = self._saver.busy
        if not self.config.ckpt_background:
            cleaned = cleaning.clean(processes())
            self._take_cleaned(self.saved_at, self._unread, cleaned)
        elif not self._unclean:
            self._saver.clean(cleaning)

    def _cleaning(self, saved_at: int, unread: Path | None) -> Cleaning:
        """What is too old beside the checkpoint of this step, as far as is known now."""
        spared = [at for at in (self.best.step, self._followed) if at is not None]
        return Cleaning(self.config, self.trainer.run, saved_at, unread, spared)

    def _take_cleaned(self, saved_at: int, unread: Path | None, cleaned: Cleaned) -> None:
        """What follows from what was found by the cleaning beside this checkpoint."""
        step, (problem, removed, read) = self.trainer.steps_done, cleaned
        self.saved_at, self._unread = saved_at, None if read else unread
        if removed:
            self.reporter.message(f"Cleaned {removed} checkpoints", step)
        if problem is not None:
            self._open.pop(saved_at, None)
            self._note(unread, Verdict(False, 0, f"it could not be read back: {problem}", -1))
            self.saved_at = None
            self.reporter.message(
                f"WARNING: the checkpoint of step {saved_at} could not be read back, older ones "
                f"stay: {problem}",
                step,
            )
