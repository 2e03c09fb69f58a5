"""Requests for a checkpoint or for the end of a run, agreed between processes."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from llmq.base.callback import Callback, StepDone
from llmq.base.errors import taken_warnings
from llmq.base.signals import SUPERVISED, FirstSignal, SaveSignal
from llmq.options.options import TrainConfig
from llmq.runtime.world import World

SAVE_NOW = "save-now"  # name of a file in --checkpoint-dir that asks for a checkpoint
LOOK_SECONDS = 1.0  # seconds between looks for the file, as a network directory may be slow
BYTES_PER_SECOND = 100e6  # assumed speed of a save, until the first save was timed
SAVE_MARGIN = 1.5  # assumed largest ratio of a save's duration to the longest save so far
SPARE_SECONDS = 2.0  # seconds that the process needs to end


class Requests(Callback):
    """Collects requests for a checkpoint or for an early end of the run: signals, a file,
    --ckpt-every-minutes and --max-hours. The loop asks between two steps, in one thread. Requests
    decide when a checkpoint is written and when a run ends, never which numbers a run computes;
    several processes agree on all requests."""

    def __init__(
        self, config: TrainConfig, checkpoint_bytes: int, start: float, world: World = World()
    ):
        """checkpoint_bytes: size of a checkpoint, from which the first save's duration is guessed.
        start: time.monotonic() at the start of the run. --max-hours counts from `start`, or from
        the first attempt of --restarts."""
        self._config, self._world = config, world
        self._attempt = time.monotonic()
        self._begin = float(os.environ.get(SUPERVISED, start))
        self._looked = -LOOK_SECONDS
        self._save_seconds = checkpoint_bytes / BYTES_PER_SECOND
        self._step_seconds = 0.0
        self._save, self._first = SaveSignal(), FirstSignal()
        self._agreed: int | None = None  # the ending signal that all processes know
        self._over = self._all_over = False  # True if --max-hours is over (here / anywhere)
        self._told: set[str] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note signals within the context instead of ending at once. The context has no effect
        outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with self._first, self._save:
            yield

    # -- of this process -------------------------------------------------------------------------

    def for_checkpoint(self) -> str | None:
        """Return the reason to write a checkpoint now, or None. Only the first process looks at the
        file and the clock."""
        now, minutes = time.monotonic(), self._config.ckpt_every_minutes
        if self._save.taken():
            return "SIGUSR1"
        if not self._world.first:
            return None
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            path = self._config.checkpoint_dir / SAVE_NOW
            if path.is_file():
                with suppress(OSError):  # a file that stays would ask again at every look
                    path.unlink()
                    return f"'{path}'"
        if minutes > 0 and now - self._attempt >= 60 * minutes:
            return "--ckpt-every-minutes"
        return None

    def for_end(self) -> bool:
        """Return True once --max-hours leaves time only for a last checkpoint."""
        if self._config.max_hours > 0 and not self._over:
            left = self._begin + 3600 * self._config.max_hours - time.monotonic()
            saves = 2 if self._config.ckpt_background else 1  # one more save may be under way
            seconds = saves * self._save_seconds + 2 * self._step_seconds
            self._over = left < SAVE_MARGIN * seconds + SPARE_SECONDS
        return self._over

    def seen_here(self) -> bool:
        """Return True if this process sees a reason for the run to end."""
        return self._first.signum is not None or self.for_end()

    def on_step(self, step: StepDone) -> None:
        """Note the duration of a step as an estimate for the next step."""
        self._step_seconds = step.ms / 1000

    def save_took(self, seconds: float) -> None:
        """Note that a save has ended, failed, or begun in the background. seconds: duration of the
        save."""
        self._attempt = time.monotonic()
        self.write_took(seconds)

    def write_took(self, seconds: float) -> None:
        """Note the duration of a checkpoint's background writing."""
        self._save_seconds = max(self._save_seconds, seconds)

    # -- of all processes ------------------------------------------------------------------------

    @property
    def signum(self) -> int | None:
        """Return the ending signal that some process has received, or None."""
        return self._agreed if self._world.several else self._first.signum

    @property
    def ends(self) -> bool:
        """Return True if a signal or --max-hours ends the run."""
        if not self._world.several:
            return self.seen_here()
        return self._agreed is not None or self._all_over

    def agree(self, *, asks: bool = False) -> str | None:
        """Exchange requests and warnings between processes, because a request may reach only one
        process. asks: True to also look for a request for a checkpoint, and return its reason. The
        first process prints the warnings of all processes."""
        world = self._world
        asked = self.for_checkpoint() if asks else None
        if not world.several:
            return asked
        answers = world.gather((self._first.signum, self.for_end(), asked, taken_warnings()))
        signals = [number for number, *_ in answers if number is not None]
        self._all_over |= any(late for _, late, *_ in answers)
        self._agreed = signals[0] if self._agreed is None and signals else self._agreed
        for index, (*_, lines) in enumerate(answers):
            new = [line for line in lines if line not in self._told]
            self._told.update(new)
            if world.first and index > 0:
                for line in new:
                    print(f"warning: {world.process_name(index)}: {line}", file=sys.stderr)
        return next((why for *_, why, _ in answers if why is not None), None)
