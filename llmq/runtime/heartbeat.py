"""Heartbeats between the processes of a run tell whether each process answers and whether any rank
makes progress.

A thread of each process sends the state of its ranks to the first process, which answers. The
thread sends heartbeats even if all other threads wait. All processes on all machines end if a
process stays silent too long, or if no rank makes progress.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from llmq.base.errors import MachineError
from llmq.runtime.workers import RankPool

# seconds of silence that are allowed at the start, when loading CUDA libraries may stop all threads
STARTING = 60.0
LATER = 3.0  # seconds by which other processes wait longer than the first, which knows more


class Doing(NamedTuple):
    """The state of a rank. waits: True if the rank waits for another rank, so that it cannot be the
    cause of a hang. line: the rank's activity as a line of text."""

    rank: int
    waits: bool
    line: str


class Beat(NamedTuple):
    """The message of a heartbeat. idle: seconds since the last progress of any rank of the process.
    busy: True if at least one rank has work. ended: True if the process has ended."""

    idle: float
    busy: bool
    ranks: tuple[Doing, ...]
    ended: bool = False


class Heartbeat:
    """The heartbeat thread of one process."""

    def __init__(self, mpi: Any, seconds: float):
        """mpi: the process's `llmq.runtime.mpi.Mpi`. seconds: value of --watchdog, positive."""
        self._mpi = mpi
        self._pool: RankPool | None = None
        self._waits: Callable[[int], bool] = lambda rank: False
        self._seconds = seconds + (0.0 if mpi.first else LATER)
        self._beats: dict[int, tuple[float, Beat]] = {}  # last beat of each process, and its time
        self._start = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def watch(self, pool: RankPool, waits: Callable[[int], bool]) -> None:
        """From now on report the activity of the ranks of `pool`. waits: function that returns True
        if a rank waits for another rank."""
        self._waits, self._pool = waits, pool
        self._tell()

    def _own(self, *, ended: bool = False) -> Beat:
        pool = self._pool
        if pool is None or pool.closed:
            return Beat(0.0, False, (), ended)
        base = pool.world.base
        ranks = tuple(
            Doing(base + rank, self._waits(rank), pool.doing(rank))
            for rank in range(pool.world_size)
        )
        return Beat(time.monotonic() - pool.progress, pool.busy, ranks, ended)

    @property
    def _others(self) -> range:
        """Return the processes to which this process sends: the first sends to all others, and all
        others send to the first."""
        return range(1, self._mpi.count) if self._mpi.first else range(1)

    def _tell(self, *, ended: bool = False) -> Beat:
        own = self._own(ended=ended)
        for process in self._others:
            self._mpi.tell(process, own)
        return own

    def _run(self) -> None:
        first, others = self._mpi.first, self._others
        while not self._closed.wait(min(1.0, self._seconds / 8)):
            for process, beat in self._mpi.heard():
                self._beats[process] = (time.monotonic(), beat)
            own = self._tell()
            problem = self._silent(others) or (self._hanging(own) if first else None)
            if problem is not None:
                self._end(problem)

    def _age(self, process: int) -> float:
        return time.monotonic() - self._beats.get(process, (self._start,))[0]

    def _silent(self, others: range) -> str | None:
        """Return an error that names a process that does not answer; None if all processes
        answer."""
        for process in others:
            _, last = self._beats.get(process, (0.0, None))
            age = self._age(process)
            patience = self._seconds if last and last.ranks else max(self._seconds, STARTING)
            if age < patience or (last is not None and last.ended):
                continue
            ranks = [f"rank {doing.rank}: {doing.line}" for doing in last.ranks] if last else []
            what = "; ".join(ranks) or "it has not begun to open its devices"
            return f"{self._name(process)} has not answered for {age:.0f} seconds; before: {what}"
        return None

    def _name(self, process: int) -> str:
        return f"process {process} on machine '{self._mpi.machines[process]}'"

    def _hanging(self, own: Beat) -> str | None:
        """Return an error if no rank of any process makes progress; else None."""
        beats = {0: own} | {process: beat for process, (_, beat) in self._beats.items()}
        ages = {process: self._age(process) for process in self._beats} | {0: 0.0}
        idle = min(beat.idle + ages[process] for process, beat in beats.items())
        if idle < self._seconds or not any(beat.busy for beat in beats.values()):
            return None
        ranks = [(p, doing) for p, beat in sorted(beats.items()) for doing in beat.ranks]
        for process, doing in ranks:
            self._print(f"rank {doing.rank} of {self._name(process)}: {doing.line}")
        process, culprit = next((pair for pair in ranks if not pair[1].waits), ranks[0])
        return (
            f"no rank has made progress for {idle:.0f} seconds; the first that waits for no other "
            f"one is rank {culprit.rank} of {self._name(process)}: {culprit.line}; raise "
            "--watchdog if this is not a hang, 0 switches it off"
        )

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _end(self, problem: str) -> None:
        self._print(f"error: {problem}")
        self._mpi.abort(MachineError.STATUS)

    def close(self) -> None:
        """Stop the thread, and tell the other processes that this process has ended."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(1.0)
        self._tell(ended=True)
