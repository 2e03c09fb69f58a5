"""Checkpoints that threads write while training continues (--ckpt-background)."""

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

THREADS = 8  # threads that write files of one process
PAUSE = 0.01  # seconds between checks whether a copy is complete
POLL = 0.1  # seconds between signs of life of a waiting caller
PATIENCE = 4.0  # seconds to finish a copy after the run has failed


class Tidied(NamedTuple):
    """The result of deleting old checkpoints. removed: number of deleted checkpoints. problem: why
    the newest checkpoint could not be read back, after which no checkpoint was deleted; else
    None."""

    removed: int
    problem: str | None = None


Tidy = Callable[[World], Tidied]
"""Function that reads the newest checkpoint back and deletes old checkpoints. All processes of the
world call this function together."""


class Written(NamedTuple):
    """The outcome of writing the checkpoint of a step. tidied: result of deleting old checkpoints,
    or the error that prevented the checkpoint. seconds: duration since the copy began."""

    step: int
    tidied: Tidied | DiskError
    seconds: float


class _GivenUp(Exception):
    """Raised in the thread when nobody wants the checkpoint any more."""


class BackgroundWriter:
    """Writes one checkpoint at a time while training continues.

    A thread of each process copies, hashes and writes the files of its ranks. Afterwards a thread
    of the first process commits, reads back and deletes; a run of one process uses the same thread
    for all. Threads make no MPI calls: processes exchange results in `ended`, between two steps.
    All processes make the same calls, except to `stop`.
    """

    def __init__(self, ranks: Ranks, directory: Path):
        """directory: folder of the run's checkpoints."""
        self._ranks, self._world, self._directory = ranks, ranks.world, directory
        self._thread: threading.Thread | None = None
        self._outcome = Outcome(None, None)
        self._commit: Callable[[list[FileEntry]], Tidied] | None = None  # called after writing
        self._given_up = self._copied = False
        self._step, self._start = 0, 0.0

    def save(self, step: int, manifest: Manifest, tidy: Tidy) -> None:
        """Begin to write a checkpoint of the present state. tidy: function to call after the
        commit."""
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
            # Signals must interrupt the main thread's waiting call, so this thread blocks all
            # signals.
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
        """Write the files of this process's ranks from the snapshots of the ranks' state."""
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
        """Return the outcome of the threads; None if a thread still works, or if there is no
        thread. Raises a thread's error unless it is a disk error. wait: True to wait for the
        outcome."""
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
        """Return the value that this process's thread has returned; raise the thread's error."""
        if self._outcome.error is not None:
            raise self._outcome.error
        return self._outcome.value

    def _all_have(self, wait: bool) -> bool:
        """Return True if the threads of all processes have ended."""
        while wait and self._thread.is_alive():
            self._thread.join(POLL)
            self._ranks.pool.beat()
        return all(self._world.gather(not self._thread.is_alive()))

    def stop(self, *, give_up: bool) -> None:
        """Wait for this process's thread, before the memory that the thread reads is freed.
        give_up: True to discard the checkpoint. The checkpoint is also discarded if its copy does
        not end within PATIENCE."""
        if self._thread is None:
            return
        end = time.monotonic() + PATIENCE
        while self._thread.is_alive():
            self._given_up = give_up or (not self._copied and time.monotonic() > end)
            self._thread.join(POLL)
        if self._given_up and not self._world.several:
            discard(self._directory, self._step)
