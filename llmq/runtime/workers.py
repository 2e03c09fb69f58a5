"""Each rank of a process has a thread for the whole run, and the first exception stops all
ranks."""

import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from llmq.base.errors import LlmqError, MachineError
from llmq.base.stopwatch import START
from llmq.runtime.world import World

POLL = 0.1  # seconds between two checks for signals while a caller waits
PATIENCE = 4.0  # seconds that stopped ranks have to end their commands
QUEUE = 8  # most commands that may wait for one rank
PACKAGE = str(Path(__file__).parents[1])

T = TypeVar("T")


class Stopped(Exception):
    """The exception in a rank's thread when another rank has failed; it is never the cause of a
    failure."""


class Workers:
    """A stop flag and a barrier, shared by the ranks of a process. Every wait of a rank for another
    rank must end once `stopped` is set."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.stopped = threading.Event()
        self._barrier = threading.Barrier(world_size)

    def check(self) -> None:
        """Raise Stopped if a rank has failed."""
        if self.stopped.is_set():
            raise Stopped

    def barrier(self) -> None:
        """Wait until all ranks call this method; use the barrier for set-up and shutdown, not in
        each step. The call may raise Stopped."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Stopped from None

    def stop(self) -> None:
        """Make all ranks stop at their next check or barrier."""
        self.stopped.set()
        self._barrier.abort()


class Command(Generic[T]):
    """A function that some ranks run, each rank with its own argument. given: the argument of each
    rank. results: the results of the ranks that have finished, by rank. waiting: the ranks that
    have not finished."""

    def __init__(self, name: str, fn: Callable[[Any], T], given: Mapping[int, Any]):
        self.name, self.fn, self.given = name, fn, given
        self.results: dict[int, T] = {}
        self.waiting = set(given)


class RankPool:
    """Runs commands (functions) on the ranks; each rank runs its commands in the order of the
    calls.

    Every rank has a thread and runs at its own pace: `post` waits for no rank, `run` waits for all.
    A single rank has no thread, and the calling thread runs its commands at once, unless ranks of
    other processes can make the rank wait. Ranks are numbered from 0 in each process.

    The first exception of a command stops all ranks, and every further call raises this exception.
    The message (of an LlmqError) or a note of the exception names the rank. An exception that a
    signal handler raises while the caller waits also stops all ranks. When ranks stop, commands
    that have not begun are dropped. Commands that do not end within `patience` seconds keep
    running, but do not keep the process from ending.

    workers: the stop flag and barrier of the ranks.
    """

    def __init__(
        self,
        world_size: int,
        *,
        watchdog: float = 0.0,
        describe: Callable[[int], str] | None = None,
        world: World | None = None,
        patience: float = PATIENCE,
    ):
        """watchdog: seconds without a `beat` or the end of a command after which running commands
        count as hanging; 0 for no watchdog. describe: function that returns further words about a
        rank's activity. world: place of these ranks among the ranks of all processes; None if all
        ranks are in this process. patience: seconds that stopped ranks have to end their
        commands."""
        self.world_size = world_size
        self.world = world or World.of(world_size)
        self._alone = self.world.size == 1
        self.workers = Workers(world_size)
        self._watchdog, self._describe, self._patience = watchdog, describe, patience
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._failed = False  # True if the last command of a single rank failed
        # time at which the patience ends, once the ranks are stopped
        self._deadline: float | None = None
        self._closed = threading.Event()
        # (name, start) of each rank's command
        self._running: list[tuple[str, float] | None] = [None] * world_size
        self._behind = [0] * world_size
        self._progress = time.monotonic()
        self._threads: list[threading.Thread] = []
        if self._alone:
            return
        self._queues = [queue.SimpleQueue() for _ in range(world_size)]
        self._threads = [self._start(f"rank {r}", self._work, r) for r in range(world_size)]
        self._watcher = self._start("watchdog", self._watch) if watchdog > 0 else None

    def _start(self, name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        return thread

    # -- commands --------------------------------------------------------------------------------

    def run(
        self, name: str, fn: Callable[[Any], T], given: Mapping[int, Any] | None = None
    ) -> list[T]:
        """Run fn(given[rank]) on the ranks in `given`; return the results by rank. name: name of
        the command, for diagnosis. given: the argument of each rank; None: all ranks run, each with
        its number as the argument."""
        with START.part(name):
            return self.wait(self.post(name, fn, given))

    def post(
        self, name: str, fn: Callable[[Any], T], given: Mapping[int, Any] | None = None
    ) -> Command[T]:
        """Start a command as `run` does, but do not wait for the command to end. The call waits
        only while a rank has QUEUE commands to run."""
        self.check_open(name)
        command = Command(name, fn, given or {rank: rank for rank in range(self.world_size)})
        if self._alone:
            self._failed = True  # stays True if the call raises
            command.results[0] = fn(command.given[0])
            self._failed, self._progress = False, time.monotonic()
            command.waiting.clear()
            return command
        self._wait_until(lambda: all(self._behind[rank] < QUEUE for rank in command.waiting))
        try:
            with self._changed:
                if not any(self._behind):
                    self._progress = time.monotonic()
                for rank in command.waiting:
                    self._behind[rank] += 1
                    self._queues[rank].put(command)
        # a signal handler raised: ranks that have the command would wait for the others
        except BaseException:
            self._settle()
            raise
        return command

    def wait(self, command: Command[T]) -> list[T]:
        self._wait_until(lambda: not command.waiting)
        return [command.results[rank] for rank in sorted(command.results)]

    def beat(self) -> None:
        """Report, from any thread, that a long command makes progress."""
        self._progress = time.monotonic()

    @property
    def progress(self) -> float:
        """Return the time.monotonic() of the last `beat` or end of a command."""
        return self._progress

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until ready() is true. Raises the error that stopped the ranks."""
        try:
            with self._changed:
                while not ready() and not self.workers.stopped.is_set():
                    self._changed.wait(POLL)
        except BaseException:
            self._settle()
            raise
        self.check()

    def check(self) -> None:
        """Raise the error that stopped the ranks, if the ranks are stopped."""
        if self.workers.stopped.is_set():
            self._settle()
            raise self._error or Stopped("the ranks were stopped")

    def _work(self, rank: int) -> None:
        """Run commands until the pool closes; a rank's thread runs this."""
        # Signals must reach the main thread, whose waiting call they interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        while (command := self._queues[rank].get()) is not None:
            if not self.workers.stopped.is_set():
                self._running[rank] = (command.name, time.monotonic())
                try:
                    command.results[rank] = command.fn(command.given[rank])
                except Stopped:
                    self._stop()
                except BaseException as error:
                    self._fail(self._named(error, rank))
            with self._changed:
                self._running[rank] = None
                self._behind[rank] -= 1
                self._progress = time.monotonic()
                command.waiting.discard(rank)
                self._changed.notify_all()

    def _name(self, rank: int) -> str:
        return self.world.name(self.world.base + rank)

    @property
    def busy(self) -> bool:
        """True if at least one rank has work."""
        return any(self._behind)

    # -- failures --------------------------------------------------------------------------------

    def _named(self, error: BaseException, rank: int) -> BaseException:
        if isinstance(error, LlmqError):
            named = type(error)(f"{self._name(rank)}: {error}")
            named.__cause__ = error
            return named
        error.add_note(f"raised by {self._name(rank)} of {self.world.size}")
        return error

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
        self._stop()

    def _stop(self) -> None:
        """Stop all ranks; further calls have no effect."""
        with self._changed:
            self._deadline = self._deadline or time.monotonic() + self._patience
            self.workers.stop()
            self._changed.notify_all()

    def _settle(self) -> bool:
        """Stop the ranks and wait for running commands to end; True if all have ended."""
        self._stop()
        with self._changed:
            while any(self._running) and (left := self._deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, POLL))
            return not any(self._running)

    def _watch(self) -> None:
        """Stop the ranks if no command makes progress; the watchdog's thread runs this."""
        while not self._closed.wait(min(1.0, self._watchdog / 4)):
            idle = time.monotonic() - self._progress
            if idle < self._watchdog or not any(self._running) or self.workers.stopped.is_set():
                continue
            for rank in range(self.world_size):
                print(f"{self._name(rank)}: {self.doing(rank)}", file=sys.stderr, flush=True)
            self._fail(
                MachineError(
                    f"no rank has made progress for {idle:.0f} seconds; what they wait for is "
                    "above; raise --watchdog if this is not a hang, 0 switches it off"
                )
            )

    def doing(self, rank: int) -> str:
        """Return a rank's activity in words: name of the command, its duration so far, and the line
        of code."""
        running = self._running[rank]
        parts = ["idle"]
        if running is not None:
            name, start = running
            parts = [f"{name} for {time.monotonic() - start:.0f} s"]
            parts.append(f"at {_place(self._threads[rank])}")
        if self._describe is not None:
            parts.append(self._describe(rank))
        return ", ".join(parts)

    # -- end of the run --------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._closed.is_set()

    def check_open(self, name: str) -> None:
        """Raise RuntimeError if `close` was called. name: name of the caller, for the message."""
        if self.closed:
            raise RuntimeError(f"{name}: the ranks are closed: make a new Trainer")

    def close(self, cleanup: Callable[[int], None] | None = None) -> None:
        """Run cleanup(rank) in each rank's thread, then end the threads. If ranks were stopped,
        cleanup still runs, in new threads, unless a rank hangs. After a failure, errors of cleanup
        are ignored, because a GPU repeats its failure at every call and the user should see the
        first error. Further calls have no effect."""
        if self.closed:
            return
        if self._alone:
            self._closed.set()
            if cleanup is not None:
                with contextlib.suppress(*([Exception] if self._failed else [])):
                    cleanup(0)
            return
        try:
            if cleanup is not None and not self.workers.stopped.is_set():
                self.run("close", cleanup)
            elif cleanup is not None and self._settle():
                self._clean_up(cleanup)
        finally:
            self._closed.set()
            for tasks in self._queues:
                tasks.put(None)
            deadline = self._deadline or time.monotonic() + self._patience
            for thread in self._threads:
                thread.join(max(deadline - time.monotonic(), POLL))
            if self._watcher is not None:
                self._watcher.join(POLL)
            if any(thread.is_alive() for thread in self._threads):
                atexit.register(_end_process, self._threads)

    def _clean_up(self, cleanup: Callable[[int], None]) -> None:
        """Run cleanup(rank) in new threads after a failure, because the ranks' own threads no
        longer run commands."""

        def clean(rank: int) -> None:
            with contextlib.suppress(Exception):
                cleanup(rank)

        threads = [self._start(f"close {rank}", clean, rank) for rank in range(self.world_size)]
        for thread in threads:
            thread.join(POLL + max(self._deadline - time.monotonic(), 0.0))


def _place(thread: threading.Thread) -> str:
    """Return, as text, the innermost line of this package that a thread is executing."""
    frame = sys._current_frames().get(thread.ident)
    stack = [] if frame is None else traceback.extract_stack(frame)
    ours = [entry for entry in stack if entry.filename.startswith(PACKAGE)] or stack
    if not ours:
        return "an unknown place"
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno} ({ours[-1].name})"


def _end_process(threads: list[threading.Thread]) -> None:
    """End the process at once if a thread still runs, because the clean-up of libraries would wait
    forever for the thread's work."""
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(MachineError.STATUS)
