"""Checkpoints that threads write while training goes on (--ckpt-background)."""

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
PAUSE = 0.01  # seconds between checks that a copy is complete
POLL = 0.1  # seconds between signs of life of a waiting caller
PATIENCE = 4.0  # seconds to finish a copy after the run has failed


class Tidied(NamedTuple):
    """A deletion of old checkpoints. removed: their number. problem: why the newest one could not
    be read back; nothing was deleted then."""

    removed: int
    problem: str | None = None


Tidy = Callable[[World], Tidied]
"""Reads the newest checkpoint back and deletes old ones, by the processes of a world together."""


class Written(NamedTuple):
    """The outcome of the threads for the checkpoint of a step. tidied: the deletion beside it, or
    why there is no checkpoint. seconds: time since the copy began."""

    step: int
    tidied: Tidied | DiskError
    seconds: float


class _GivenUp(Exception):
    """The checkpoint is not wanted any more."""


class BackgroundWriter:
    """Writes a checkpoint while training goes on; one at a time.

    A thread of each process copies, hashes and writes the files of its ranks. Then a thread of the
    first process commits, reads back and deletes; with one process the same thread does so at once.
    Threads call nothing of MPI: processes meet in `ended`, between two steps. All processes call
    all methods but `stop` alike.
    """

    def __init__(self, ranks: Ranks, directory: Path):
        """directory: of checkpoints."""
        self._ranks, self._world, self._directory = ranks, ranks.world, directory
        self._thread: threading.Thread | None = None
        self._outcome = Outcome(None, None)
        self._commit: Callable[[list[FileEntry]], Tidied] | None = None  # follows the files
        self._given_up = self._copied = False
        self._step, self._start = 0, 0.0

    def save(self, step: int, manifest: Manifest, tidy: Tidy) -> None:
        """Begin to write a checkpoint of this moment. tidy: is called after the commit."""
        self._step, self._start, self._copied = step, time.monotonic(), False
        self._ranks.run("copying the state", lambda rank: rank.step.snapshot.take())

        def commit(files: list[FileEntry]) -> Tidied:
            self._writer(self._ranks.world.base).commit(manifest, files)
            return tidy(World())

        if not self._world.several:
            self._begin(lambda: commit(self._write()))
        else:
            self._commit = commit
            self._begin(self._write)

    def _begin(self, work: Callable[[], Any]) -> None:
        def run() -> None:
            # Signals are for the main thread, which waits in a call that they interrupt.
            signal.pthread_sigmask(signal.SIG_BLOCK, {*ending_signals(), signal.SIGUSR1})
            try:
                self._outcome = Outcome(work(), None)
            except BaseException as error:
                self._outcome = Outcome(None, error)

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    # -- in the thread ---------------------------------------------------------------------------

    def _writer(self, rank: int) -> CheckpointWriter:
        return CheckpointWriter(self._directory, self._step, rank, self._world.size)

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

    # -- between two steps -----------------------------------------------------------------------

    def ended(self, *, wait: bool = False) -> Written | None:
        """The outcome of the threads; None if they go on, or there is none. Raises errors other
        than the disk's. wait: until the outcome is known."""
        while self._thread is not None and self._all_have(wait):
            self._thread, commit, self._commit = None, self._commit, None
            try:
                if commit is not None:
                    files = [file for own in self._world.together(self._value) for file in own]
                    self._begin(partial(commit, files) if self._world.first else lambda: None)
                    continue
                tidied = self._world.on_first(self._value)
            except BaseException as error:
                if self._world.first:
                    discard(self._directory, self._step)
                if not isinstance(error, DiskError):
                    raise
                tidied = error
            return Written(self._step, tidied, time.monotonic() - self._start)
        return None

    def _value(self) -> Any:
        """The value of this process's thread; raises its error."""
        if self._outcome.error is not None:
            raise self._outcome.error
        return self._outcome.value

    def _all_have(self, wait: bool) -> bool:
        """True if the threads of all processes have ended."""
        while wait and self._thread.is_alive():
            self._thread.join(POLL)
            self._ranks.pool.beat()
        return all(self._world.gather(not self._thread.is_alive()))

    def stop(self, *, give_up: bool) -> None:
        """Wait for the thread of this process, whose memory is going to be freed. give_up: discard
        the checkpoint, as is done, too, if its copy does not end within PATIENCE."""
        if self._thread is None:
            return
        end = time.monotonic() + PATIENCE
        while self._thread.is_alive():
            self._given_up = give_up or (not self._copied and time.monotonic() > end)
            self._thread.join(POLL)
        if self._given_up and not self._world.several:
            discard(self._directory, self._step)
