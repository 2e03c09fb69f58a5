"""The checkpoints of a run: when one is written, which of them stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmq.base.errors import DiskFull
from llmq.checkpoint.best import Best, Found
from llmq.checkpoint.store import clean_old
from llmq.runtime.processes import processes
from llmq.train.metrics import Reporter
from llmq.train.trainer import Trainer


class Keeping:
    """Writes checkpoints, deletes what is too old, and knows the best.

    saved_at: step of the newest checkpoint that holds this state.
    """

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        best: Best,
        history: Callable[[], dict[str, Any]],
    ):
        """history: what a checkpoint keeps of the run's reports."""
        self.trainer, self.reporter, self.best = trainer, reporter, best
        self.config = trainer.config
        self.saved_at: int | None = None
        self._history = history

    def save(self, *, required: bool = False) -> None:
        """Write a checkpoint, if the newest is not of this step, and delete what is too old.

        required: DiskFull is raised, because no other chance follows; else it is only said.
        """
        config, step = self.config, self.trainer.steps_done
        if self.saved_at == step:
            return
        self.trainer.history = self._history()
        try:
            with self.reporter.section(f"saving checkpoint to `{config.checkpoint_dir}`", step):
                self.trainer.save()
        except DiskFull as error:
            if required:
                raise
            self.reporter.message(f"WARNING: no checkpoint of step {step}: {error}", step)
            return
        self.saved_at = step
        self._clean()

    def resume_best(self) -> None:
        """Take what an earlier part of the run has noted of the best checkpoint."""

        def noted() -> Best:
            self.best.resume(self.trainer.run, self.trainer.steps_done)
            return self.best

        self.best = processes().on_first(noted)

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
        except DiskFull as error:
            self.reporter.message(f"WARNING: {error}", step)
        self.reporter.message(f"Best so far: {metric} {found[metric][0]:.6g} at step {step}", step)
        self._clean()

    def _clean(self) -> None:
        config, step = self.config, self.trainer.steps_done
        keep = (config.ckpt_keep_n, config.ckpt_major)
        own = (self.trainer.run, self.best.step)
        where = config.checkpoint_dir
        removed = processes().on_first(lambda: clean_old(where, *keep, step, *own))
        if removed:
            self.reporter.message(f"Cleaned {len(removed)} checkpoints", step)
