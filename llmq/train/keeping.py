"""The checkpoints of a run: when one is written, which of them stay, which were good."""

from __future__ import annotations

from pathlib import Path

from llmq.base.errors import DiskError
from llmq.checkpoint.best import Best, Found
from llmq.checkpoint.disks import Disks
from llmq.checkpoint.retention import forget_pages, outdated
from llmq.checkpoint.store import checkpoint_owner, clean_old, kept_checkpoints
from llmq.checkpoint.verdict import PROVEN, Verdict, write_verdict
from llmq.checkpoint.verify import problem_of
from llmq.train.guard import PERSISTS, Guard, Judgement
from llmq.train.history import History
from llmq.train.metrics import Reporter
from llmq.train.trainer import Trainer


class Keeping:
    """Writes checkpoints, deletes what is too old, and knows the best and the good ones.

    saved_at: step of the newest checkpoint that holds this state. late: whether a checkpoint waits
    for the first good step.
    """

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        best: Best,
        guard: Guard,
        history: History,
    ):
        self.trainer, self.reporter, self.best, self.guard = trainer, reporter, best, guard
        self.config = trainer.config
        self.saved_at: int | None = None
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
        known = kept_checkpoints(self.config.checkpoint_dir, self.trainer.run, self.trainer.disks)
        for at, (path, verdict, _) in known.items():
            if at <= step and (verdict is None or not verdict.good):
                self._open[at] = path
                if verdict is not None:
                    self._bad[at] = verdict.level
        self.resume_best()

    def save(self, *, required: bool = False, asked: bool = False) -> None:
        """Write a checkpoint, if the newest is not of this step, and delete what is too old.

        After a bad step only if it is required or asked for: it might hold what that one has
        spoiled. required: DiskError is raised, because no other chance follows; else it is said.
        """
        config, step = self.config, self.trainer.steps_done
        if self.saved_at == step:
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
        self.late = False
        self.trainer.history = self._history.state()
        try:
            with self.reporter.section(f"saving checkpoint to `{config.checkpoint_dir}`", step):
                path = self.trainer.save()
        except DiskError as error:
            if required:
                raise
            self.reporter.message(f"WARNING: no checkpoint of step {step}: {error}", step)
            return
        self.saved_at, self._unread = step, path
        if self.guard.in_row >= PERSISTS:
            self._note(path, Verdict(False, 0, f"the last {self.guard.in_row} steps were bad", -1))
        else:
            self._open[step] = path
            self._bad.pop(step, None)
        self._clean()

    def resume_best(self) -> None:
        """Take what an earlier part of the run has noted of the best checkpoint."""
        self.best.resume(self.trainer.run, self.trainer.steps_done)

    def keep_best(self, found: Found) -> None:
        """Write a checkpoint of this step, too, if it is the best so far. found: what is known."""
        step, metric = self.trainer.steps_done, self.best.metric
        if not self.best.improves(found):
            return
        self.save()
        if self.saved_at != step:  # the disk is full
            return
        try:
            self.best.note(found, step, self.trainer.run)
        except DiskError as error:
            self.reporter.message(f"WARNING: {error}", step)
        self.reporter.message(f"Best so far: {metric} {found[metric][0]:.6g} at step {step}", step)
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

    def _note(self, path: Path, verdict: Verdict) -> None:
        """Write a verdict on every disk; all processes have come to the same."""
        if not self.trainer.disks.leads:
            return
        try:
            mine = self.trainer.run.owns(checkpoint_owner(path))
            if mine and path.is_dir():  # else it was removed, or replaced
                write_verdict(path, verdict)
        except DiskError as error:
            self.reporter.message(f"WARNING: {error}", self.trainer.steps_done)

    # -- old ones --------------------------------------------------------------------------------

    def _clean(self) -> None:
        """Delete what is too old, when the newest was read back from the disk."""
        step, saved_at = self.trainer.steps_done, self.saved_at
        if saved_at is None:
            return
        spared = [at for at in (self.best.step, self._followed) if at is not None]
        problem, removed, read = self._cleaned(saved_at, self._unread, spared, self.trainer.disks)
        if removed:
            self.reporter.message(f"Cleaned {removed} checkpoints", step)
        if problem is not None:
            self._open.pop(saved_at, None)
            self._note(self._unread, Verdict(False, 0, f"it could not be read back: {problem}", -1))
            self.saved_at = None
            self.reporter.message(
                f"WARNING: the checkpoint of step {saved_at} could not be read back, older ones "
                f"stay: {problem}",
                step,
            )
        if read:
            self._unread = None

    def _cleaned(
        self, saved_at: int, unread: Path | None, spared: list[int], disks: Disks
    ) -> tuple[str | None, int, bool]:
        """Why the newest could not be read back, how many others were deleted, and whether it was
        read. unread: the newest, if it was not read back yet. All processes of disks call it."""
        config, read = self.config, False
        where = (config.checkpoint_dir, self.trainer.run)
        keep = (config.ckpt_keep_n, config.ckpt_major, saved_at)
        besides = {
            "spared": spared,
            "interval": config.ckpt_interval if config.guard == "rollback" else 0,
        }
        if config.ckpt_keep_n > 0 and unread is not None:
            read = bool(outdated(kept_checkpoints(*where, disks), *keep, **besides))
        if read:
            forget_pages(unread)
            problem = problem_of(unread, disks.group)
            if problem is not None:
                return problem, 0, read
        removed = clean_old(where[0], *keep, where[1], **besides, disks=disks)
        return None, len(removed), read
