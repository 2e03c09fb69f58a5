"""How a checkpoint is written in a thread while training goes on."""

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmq.base.errors import DiskError
from llmq.base.signals import ending_signals
from llmq.checkpoint.checkpoint import CheckpointWriter, FileEntry, write_group
from llmq.checkpoint.folder import discard
from llmq.checkpoint.manifest import Manifest
from llmq.run.ranks import Ranks
from llmq.runtime.world import Outcome, World
from llmq.state.pieces import SlabPiece

THREADS = 8  # that write files of one process
PAUSE = 0.01  # seconds between two looks whether a copy is complete
POLL = 0.1  # seconds after which a caller that waits shows that it goes on
PATIENCE = 4.0  # seconds that a copy has to end when the run has failed


class Cleaned(NamedTuple):
    """The checkpoints that were deleted beside the newest. problem: why that one could not be read
    back. removed: how many went. read: whether it was read back."""

    problem: str | None
    removed: int
    read: bool


Clean = Callable[[World], Cleaned]
"""Reads the newest checkpoint back and deletes old ones, by the processes of a world together."""


class Written(NamedTuple):
    """The outcome of a thread. step: of the checkpoint; None: there was none to write. path: of it;
    None where error is why there is none. cleaned: beside it. seconds: from the copy on.
    """

    step: int | None
    path: Path | None
    error: DiskError | None
    cleaned: Cleaned | None
    seconds: float


class _GivenUp(Exception):
    """Nobody wants the checkpoint any more."""


def _value(outcome: Outcome) -> Any:
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


class BackgroundWriter:
    """Writes a checkpoint while training goes on; one at a time.

    Threads copy, hash and write; what needs MPI is done by those who call, between two steps. When
    all processes have written their files, the thread of the first commits, reads back and deletes.
    All methods but `stop` are called by all processes alike.
    """

    def __init__(self, ranks: Ranks, directory: Path):
        """directory: of checkpoints."""
        self._ranks, self._world, self._directory = ranks, ranks.world, directory
        self._thread: threading.Thread | None = None
        self._outcome = Outcome(None, None)
        # A function that follows when the threads of all processes have ended; it gets the outcome
        # of this one's.
        self._then: Callable[[Outcome], Written | None] = self._shared
        self._given_up = self._copied = False
        self._step: int | None = None
        self._start = 0.0

    @property
    def busy(self) -> bool:
        """Whether there is something of which `ended` has not told."""
        return self._thread is not None

    # -- what is begun ---------------------------------------------------------------------------

    def save(self, step: int, manifest: Manifest, clean: Clean) -> None:
        """Begin to write a checkpoint of this moment. clean: what follows the commit."""
        self._step, self._start, self._copied = step, time.monotonic(), False
        self._ranks.run("copying the state", lambda rank: rank.step.snapshot.take())
        if not self._world.several:
            self._begin(lambda: self._alone(manifest, clean), self._shared)
        else:
            self._begin(self._write, partial(self._commit, manifest, clean))

    def clean(self, clean: Clean) -> None:
        """Begin to delete, between checkpoints."""
        self._step, self._start, self._copied = None, time.monotonic(), True
        self._on_first(lambda: self._done(cleaned=clean(World())))

    def _on_first(self, work: Callable[[], Written]) -> None:
        """Begin what the first process's thread does for all."""
        self._begin(work if self._world.first else lambda: None, self._shared)

    def _begin(self, work: Callable[[], Any], then: Callable[[Outcome], Written | None]) -> None:
        def run() -> None:
            # Signals are for the main thread, which waits in a call that they interrupt.
            signal.pthread_sigmask(signal.SIG_BLOCK, {*ending_signals(), signal.SIGUSR1})
            try:
                self._outcome = Outcome(work(), None)
            except BaseException as error:
                self._outcome = Outcome(None, error)

        self._then = then
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _done(
        self,
        path: Path | None = None,
        error: DiskError | None = None,
        cleaned: Cleaned | None = None,
    ) -> Written:
        return Written(self._step, path, error, cleaned, time.monotonic() - self._start)

    # -- in the thread ---------------------------------------------------------------------------

    def _alone(self, manifest: Manifest, clean: Clean) -> Written:
        try:
            files = self._write()
        except BaseException as error:
            self._discard()
            if not isinstance(error, DiskError):
                raise
            return self._done(error=error)
        return self._last(manifest, clean, files)

    def _last(self, manifest: Manifest, clean: Clean, files: list[FileEntry]) -> Written:
        """The work of one process for all of them."""
        try:
            path = self._writer(self._world.base).commit(manifest, files)
        except DiskError as error:
            return self._done(error=error)
        return self._done(path, cleaned=clean(World()))

    def _writer(self, rank: int) -> CheckpointWriter:
        return CheckpointWriter(self._directory, self._step, rank, self._world.size)

    def _discard(self) -> None:
        discard(self._directory, self._step)

    def _write(self) -> list[FileEntry]:
        """The files of this process's ranks, from the copies."""
        snapshots = self._ranks.snapshots
        while not all(snapshot.is_done() for snapshot in snapshots.values()):
            self._look()
            time.sleep(PAUSE)
        self._copied = True
        failed = threading.Event()

        def beat() -> None:
            self._look()
            if failed.is_set():
                raise _GivenUp

        def write(writer: CheckpointWriter, group: str, pieces: list[SlabPiece]) -> FileEntry:
            try:
                return write_group(lambda tensor: tensor.numpy(), writer, group, pieces, beat)
            except BaseException:
                failed.set()
                raise

        files = [
            partial(write, writer, *group)
            for rank, snapshot in snapshots.items()
            for writer in [self._writer(rank)]
            for group in snapshot.copy.items()
        ]
        with ThreadPoolExecutor(min(THREADS, len(files))) as pool:
            written = [pool.submit(file) for file in files]
        errors = [error for file in written if (error := file.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, _GivenUp)):
            raise error
        return [file.result() for file in written]

    def _look(self) -> None:
        if self._given_up:
            raise _GivenUp

    # -- what is known of it ---------------------------------------------------------------------

    def ended(self, *, wait: bool = False) -> Written | None:
        """The outcome of it; None: it goes on, or there is nothing. Raises what is no failure of
        the disk. wait: until it is known."""
        while self._thread is not None and self._all_have(wait):
            self._thread = None
            done = self._then(self._outcome)
            if done is not None:
                return done
        return None

    def _shared(self, outcome: Outcome) -> Written:
        """The outcome of the first process's thread."""
        return self._world.on_first(partial(_value, outcome))

    def _commit(self, manifest: Manifest, clean: Clean, outcome: Outcome) -> Written | None:
        """When the threads of several processes have written their files, or could not."""
        try:
            of_processes = self._world.together(partial(_value, outcome))
        except BaseException as error:
            if self._world.first:
                self._discard()
            if not isinstance(error, DiskError):
                raise
            return self._done(error=error)
        files = [entry for found in of_processes for entry in found]
        self._on_first(lambda: self._last(manifest, clean, files))
        return None

    def _all_have(self, wait: bool) -> bool:
        """Whether the threads of all processes have ended."""
        while wait and self._thread.is_alive():
            self._thread.join(POLL)
            self._ranks.pool.beat()
        return all(self._world.gather(not self._thread.is_alive()))

    def stop(self, *, give_up: bool) -> None:
        """Wait for the thread of this process, whose memory is going to be freed.

        give_up: the checkpoint. It is given up as well if its copy does not end.
        """
        if self._thread is None:
            return
        end = time.monotonic() + PATIENCE
        while self._thread.is_alive():
            self._given_up = give_up or (not self._copied and time.monotonic() > end)
            self._thread.join(POLL)
