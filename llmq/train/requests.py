"""What asks a run for a checkpoint, or for its end, beside its steps and ending signals."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from llmq.base.signals import SUPERVISED, SaveSignal
from llmq.options.options import TrainConfig
from llmq.runtime.processes import processes

SAVE_NOW = "save-now"  # a file of this name in the directory of checkpoints asks for one
LOOK_SECONDS = 1.0  # between two looks for that file: a directory may be far away
BYTES_PER_SECOND = 100e6  # of writing a checkpoint, as long as none has been timed
MARGIN = 1.5  # what a checkpoint may take longer than the longest so far
SPARE_SECONDS = 2.0  # for the end of the process


class Requests:
    """Asked between two steps, in one thread.

    start: of the run, of time.monotonic(). The clock of --max-hours runs from then on, or from the
    start of the first attempt of --restarts: the job's time is not longer for a crash.

    Answers depend on this machine's clock and files: they decide when a checkpoint is written and
    when a run ends, never what it computes. Several processes agree on them between two steps.
    """

    def __init__(self, config: TrainConfig, checkpoint_bytes: int, start: float):
        self._config = config
        self._attempt = time.monotonic()
        self._begin = float(os.environ.get(SUPERVISED, start))
        self._looked = -LOOK_SECONDS
        self._save_seconds = checkpoint_bytes / BYTES_PER_SECOND
        self._step_seconds = 0.0
        self._over = False
        self.signal = SaveSignal()

    def for_checkpoint(self) -> str | None:
        """What asks for one now, if anything does. Files and clock only ask the first process."""
        now, minutes = time.monotonic(), self._config.ckpt_every_minutes
        if self.signal.taken():
            return "SIGUSR1"
        if not processes().first:
            return None
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            path = self._config.checkpoint_dir / SAVE_NOW
            if path.is_file() and _taken(path):
                return f"'{path}'"
        if minutes > 0 and now - self._attempt >= 60 * minutes:
            return "--ckpt-every-minutes"
        return None

    def for_end(self) -> bool:
        """Whether --max-hours leaves time for no more than a checkpoint. Once so, always so."""
        if self._config.max_hours > 0 and not self._over:
            left = self._begin + 3600 * self._config.max_hours - time.monotonic()
            saves = 2 if self._config.ckpt_background else 1  # one may be under way
            needed = MARGIN * (saves * self._save_seconds + 2 * self._step_seconds) + SPARE_SECONDS
            self._over = left < needed
        return self._over

    def step_took(self, seconds: float) -> None:
        """What the next step may take, too."""
        self._step_seconds = seconds

    def save_took(self, seconds: float) -> None:
        """A checkpoint was written or tried to, or was begun in the background."""
        self._attempt = time.monotonic()
        self.write_took(seconds)

    def write_took(self, seconds: float) -> None:
        """One that was begun in the background is written."""
        self._save_seconds = max(self._save_seconds, seconds)


def _taken(path: Path) -> bool:
    """Remove what asked; what cannot be removed would ask for ever, so it does not count."""
    with suppress(OSError):
        path.unlink()
        return True
    return False
