"""Which checkpoints a run deletes, after it has read the newest one back from the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from llmq.base.run_id import RunId
from llmq.checkpoint.retention import Kept, forget_pages, outdated
from llmq.checkpoint.store import clean_old, kept_checkpoints
from llmq.checkpoint.verify import problem_of
from llmq.options.options import TrainConfig
from llmq.runtime.processes import Processes


class Cleaned(NamedTuple):
    """problem: why the newest could not be read back. removed: how many others were deleted. read:
    whether it was read back."""

    problem: str | None
    removed: int
    read: bool


class Cleaning(NamedTuple):
    """What is to be deleted beside the checkpoint of step saved_at.

    config, run: of the checkpoints. unread: the one of saved_at, if it was not read back yet.
    spared: steps whose checkpoints stay.
    """

    config: TrainConfig
    run: RunId
    saved_at: int
    unread: Path | None
    spared: list[int]

    @property
    def _keep(self) -> tuple[int, int, int]:
        return self.config.ckpt_keep_n, self.config.ckpt_major, self.saved_at

    @property
    def _besides(self) -> dict[str, Any]:
        interval = self.config.ckpt_interval if self.config.guard == "rollback" else 0
        return {"spared": self.spared, "interval": interval}

    def _found(self) -> dict[int, Kept]:
        """What is there, if some of it may have to go."""
        if self.config.ckpt_keep_n <= 0:
            return {}
        return kept_checkpoints(self.config.checkpoint_dir, self.run)

    def _would_delete(self, found: dict[int, Kept]) -> bool:
        return bool(found and outdated(found, *self._keep, **self._besides))

    def clean(self, group: Processes) -> Cleaned:
        """Delete what is too old, if the newest is whole. All processes of the group call it."""
        found = group.on_first(self._found)
        read = self.unread is not None and self._would_delete(found)
        if read:
            forget_pages(self.unread)
            problem = problem_of(self.unread, group)
            if problem is not None:
                return Cleaned(problem, 0, read)
        where = self.config.checkpoint_dir
        how = self._besides | {"found": found}
        removed = group.on_first(lambda: clean_old(where, *self._keep, self.run, **how))
        return Cleaned(None, len(removed), read)
