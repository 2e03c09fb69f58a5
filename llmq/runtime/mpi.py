"""Exchange of values between the processes of a run that an MPI launcher has started.

No call into MPI blocks: each call starts an operation, and the caller polls until the operation is
done. One lock is therefore enough for all threads, even with MPI libraries that do not fully
support threads. A waiting thread notices signals and failures, and does not hold the interpreter
lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from llmq.base.errors import LlmqError
from llmq.runtime.heartbeat import Heartbeat
from llmq.runtime.machine import use_all_cpus
from llmq.runtime.world import World, launched

if TYPE_CHECKING:
    from llmq.runtime.workers import RankPool

T = TypeVar("T")

# seconds that a wait polls without a pause, so that small messages arrive sooner
SPIN_SECONDS = 2e-4
LONGEST_PAUSE = 1e-3  # longest pause between two later polls, in seconds
LARGEST = 1 << 30  # most bytes of one message, because MPI counts elements in 32 bits
EXIT_SECONDS = 5.0  # seconds after which a process ends itself if MPI does not end it
CONTROL, WATCH = 0, 1  # MPI tags of control messages and of watch messages
FIRST_DATA_TAG = 16


def join() -> World:
    """Initialize MPI; return the world, with a rank for each process. Raises LlmqError if MPI
    cannot be initialized, or if MPI's number of processes differs from the launcher's. Every
    process calls this function once."""
    expected = launched()
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"  # MPI may provide less thread support
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LlmqError(
            f"{expected} processes were started, but MPI cannot be loaded ({error}): install "
            "llmq's extra `mpi`, which brings mpi4py and Open MPI, or mpi4py for the cluster's own"
        ) from None
    if MPI.COMM_WORLD.Get_size() != expected:
        raise LlmqError(
            f"{expected} processes were started, but MPI sees {MPI.COMM_WORLD.Get_size()}: "
            "the launcher does not belong to the MPI of mpi4py; start with that one's mpirun, or "
            "with srun --mpi=pmix"
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise LlmqError("this MPI allows a single thread: one with MPI_THREAD_SERIALIZED is needed")
    use_all_cpus()
    mpi = Mpi(MPI)
    return World((1,) * mpi.count, mpi.machines, mpi.index, mpi)


class Mpi:
    """The exchange of values between processes, used by World. Values of `gather` and `share` go
    through the first process. index: number of this process. count: number of processes. first:
    True in the first process only. machines: name of the machine of each process."""

    def __init__(self, mpi: Any):
        """mpi: the initialized module mpi4py.MPI."""
        self._mpi = mpi
        machine = os.environ.get("LLMQ_MACHINE") or socket.gethostname()
        names = mpi.COMM_WORLD.allgather(machine)
        self.machines = tuple(sorted(names, key=names.index))
        # Some launchers assign processes to machines in turn. The new numbers make a machine's
        # processes adjacent.
        world = mpi.COMM_WORLD.Split(0, names.index(machine))
        self._control, self._data = world, world.Dup()
        self._lock = threading.Lock()
        self.index, self.count = world.Get_rank(), world.Get_size()
        self.first = self.index == 0
        self.check: Callable[[], None] = lambda: None  # raises if waiting is pointless
        self._heartbeat: Heartbeat | None = None
        # `tell` keeps its requests here, because a request owns the memory of its message
        self._told: list[Any] = []

    # -- waiting ---------------------------------------------------------------------------------

    def wait(self, done: Callable[[], T | None], check: Callable[[], None]) -> T:
        """Call done() under the lock until its value is true, and return the value. check: function
        called between polls, which raises if waiting is pointless."""
        start, pause = time.perf_counter(), 0.0
        while True:
            with self._lock:
                result = done()
            if result:
                return result
            check()
            if pause == 0.0 and time.perf_counter() - start < SPIN_SECONDS:
                time.sleep(0)
                continue
            pause = min(pause + 2e-5, LONGEST_PAUSE)
            time.sleep(pause)

    # -- control ---------------------------------------------------------------------------------

    def _send(self, data: bytes, to: int) -> Any:
        with self._lock:
            return self._control.Isend([data, self._mpi.BYTE], to, CONTROL)

    def _receive(self, source: int) -> bytearray:
        def arrived() -> Any:
            return self._control.Improbe(source, CONTROL, status)

        status = self._mpi.Status()
        message = self.wait(arrived, self.check)
        data = bytearray(status.Get_count(self._mpi.BYTE))
        with self._lock:
            request = message.Irecv([data, self._mpi.BYTE])
        self.finish([request], self.check)
        return data

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, as World.gather does."""
        if self.first:
            others = (pickle.loads(self._receive(i)) for i in range(1, self.count))
            return self.share([value, *others])
        data = pickle.dumps(value)
        request = self._send(data, 0)
        values = self.share(None)
        self.finish([request], self.check)
        return values

    def share(self, value: T) -> T:
        """Return the first process's value, as World.share does."""
        if self.first:
            data = pickle.dumps(value)
            self.finish([self._send(data, i) for i in range(1, self.count)], self.check)
            return value
        return pickle.loads(self._receive(0))

    # -- data ------------------------------------------------------------------------------------

    def begin(
        self,
        sends: Sequence[tuple[int, int, np.ndarray]] = (),
        receives: Sequence[tuple[int, int, np.ndarray]] = (),
    ) -> list[Any]:
        """Start to send and receive contiguous arrays; the arrays' memory is in use until `finish`.
        Each item of `sends` and `receives` has the other process, a number for the data, and the
        array. Between two processes, arrays with the same number arrive in the order of sending."""
        requests = []
        with self._lock:
            for calls, begin in ((receives, self._data.Irecv), (sends, self._data.Isend)):
                for process, number, array in calls:
                    data = array.reshape(-1).view(np.uint8)
                    for start in range(0, data.size, LARGEST):
                        piece = [data[start : start + LARGEST], self._mpi.BYTE]
                        requests.append(begin(piece, process, FIRST_DATA_TAG + number))
        return requests

    def finish(self, requests: list[Any], check: Callable[[], None]) -> None:
        """Wait until the requests of `begin` are done. check: function that raises if waiting is
        pointless."""
        if requests:
            self.wait(lambda: self._mpi.Request.Testall(requests), check)

    def gather_arrays(
        self, parts: list[tuple[int, np.ndarray]], *, to_all: bool = True
    ) -> list[tuple[int, np.ndarray]]:
        """Return the arrays of all processes, as World.gather_arrays does."""
        headers = self.gather([(number, array.size, array.dtype) for number, array in parts])
        others = [p for p in range(self.count) if p != self.index]
        requests, gathered = [], []
        for process, header in enumerate(headers):
            if process == self.index:
                gathered += parts
            elif to_all or self.first:
                arrays = [(number, np.empty(size, dtype)) for number, size, dtype in header]
                requests += self.begin(receives=[(process, 0, array) for _, array in arrays])
                gathered += arrays
        for process in others if to_all else [] if self.first else [0]:
            requests += self.begin(sends=[(process, 0, array) for _, array in parts])
        self.finish(requests, self.check)
        return gathered

    # -- watching --------------------------------------------------------------------------------

    def start_heartbeat(self, seconds: float) -> None:
        """Start to watch whether all processes answer and make progress. seconds: value of
        --watchdog; 0 to start no watch."""
        if seconds > 0:
            self._heartbeat = Heartbeat(self, seconds)

    def watch(self, pool: RankPool, waits: Callable[[int], bool]) -> None:
        """Report the ranks of `pool` as the ranks of this process. waits: function that returns
        True if a rank waits for another rank."""
        self.check = pool.check
        if self._heartbeat is not None:
            self._heartbeat.watch(pool, waits)

    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()

    def tell(self, to: int, value: Any) -> None:
        """Send a small value to another process, which gets it by `heard`; do not wait."""
        with self._lock:
            self._told = [request for request in self._told if not request.Test()]
            self._told.append(self._data.isend(value, to, WATCH))

    def heard(self) -> list[tuple[int, Any]]:
        """Return (process, value) of all messages that arrived since the last call."""
        messages, status = [], self._mpi.Status()
        with self._lock:
            while self._data.iprobe(self._mpi.ANY_SOURCE, WATCH, status):
                messages.append((status.source, self._data.recv(None, status.source, WATCH)))
        return messages

    # -- end of the run --------------------------------------------------------------------------

    def abort(self, status: int) -> NoReturn:
        """End all processes on all machines with this exit status."""
        timer = threading.Timer(EXIT_SECONDS, os._exit, [status])
        timer.daemon = True
        timer.start()
        until = time.monotonic() + EXIT_SECONDS / 2
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            wait_for_reader(stream, until)
        self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)


def wait_for_reader(stream: Any, until: float) -> None:
    """Wait until the reader of a pipe has read all bytes, or until the time `until` of
    time.monotonic. A launcher drops unread output of a process that aborts, and that output may
    explain the error."""
    with contextlib.suppress(OSError, ValueError):  # the stream may be no pipe, or have no file
        while any(fcntl.ioctl(stream.fileno(), termios.FIONREAD, b"\0\0\0\0")):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
