"""The processes of a run that a launcher of MPI has started.

No call into MPI waits: all are of the kind that begins something, and are looked after until they
are done. So one lock is enough for all threads, a library without support for several threads at
once serves too, signals and failures are seen while waiting, and no thread keeps the interpreter.
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

SPIN_SECONDS = 2e-4  # that a wait looks without a pause: small messages arrive in less
LONGEST_PAUSE = 1e-3  # seconds between two looks later
LARGEST = 1 << 30  # bytes of one message: MPI counts elements in 32 bits
EXIT_SECONDS = 5.0  # after which a process ends itself where MPI does not end it
CONTROL, WATCH = 0, 1  # tags beside those of data
FIRST_DATA_TAG = 16


def join() -> World:
    """Initialize MPI; the world, with one rank for each process. LlmqError where MPI cannot be
    initialized, or sees other processes than there are. Called once, by all processes."""
    expected = launched()
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"  # what there is may be less
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
    """The exchange of values between processes, for World; `gather` and `share` go through the
    first process. index: of this process. count: of all. machines: the name of each one's
    machine."""

    def __init__(self, mpi: Any):
        """mpi: the module mpi4py.MPI, initialized."""
        self._mpi = mpi
        machine = os.environ.get("LLMQ_MACHINE") or socket.gethostname()
        names = mpi.COMM_WORLD.allgather(machine)
        self.machines = tuple(sorted(names, key=names.index))
        # The launcher may deal processes to machines in turn; here those of a machine are together.
        world = mpi.COMM_WORLD.Split(0, names.index(machine))
        self._control, self._data = world, world.Dup()
        self._lock = threading.Lock()
        self.index, self.count = world.Get_rank(), world.Get_size()
        self.first = self.index == 0
        self.check: Callable[[], None] = lambda: None  # raises if there is no use in waiting
        self._heartbeat: Heartbeat | None = None
        self._told: list[Any] = []  # what `tell` has begun, which keeps its memory

    # -- waiting ---------------------------------------------------------------------------------

    def wait(self, done: Callable[[], T | None], check: Callable[[], None]) -> T:
        """Call done() under the lock until it returns something, and that. check: called between;
        raises if there is no use in waiting."""
        start, pause = time.perf_counter(), 0.0
        while True:
            with self._lock:
                found = done()
            if found:
                return found
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
        """Gather as World.gather does."""
        if self.first:
            others = (pickle.loads(self._receive(i)) for i in range(1, self.count))
            return self.share([value, *others])
        data = pickle.dumps(value)
        request = self._send(data, 0)
        values = self.share(None)
        self.finish([request], self.check)
        return values

    def share(self, value: T) -> T:
        """Share as World.share does."""
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
        """Begin to send and to receive contiguous arrays; their memory is in use until `finish`.
        Each: the other process, a number that says which data it is, and the array. Between two
        processes, arrays of the same number arrive in the order in which they were sent."""
        requests = []
        with self._lock:
            for calls, begin in ((receives, self._data.Irecv), (sends, self._data.Isend)):
                for process, number, array in calls:
                    data = array.reshape(-1).view(np.uint8)
                    for at in range(0, data.size, LARGEST):
                        piece = [data[at : at + LARGEST], self._mpi.BYTE]
                        requests.append(begin(piece, process, FIRST_DATA_TAG + number))
        return requests

    def finish(self, requests: list[Any], check: Callable[[], None]) -> None:
        """Wait until they are done. check: raises if there is no use in waiting."""
        if requests:
            self.wait(lambda: self._mpi.Request.Testall(requests), check)

    def gather_arrays(
        self, parts: list[tuple[int, np.ndarray]], *, to_all: bool = True
    ) -> list[tuple[int, np.ndarray]]:
        """Gather arrays as World.gather_arrays does."""
        headers = self.gather([(number, array.size, array.dtype) for number, array in parts])
        others = [p for p in range(self.count) if p != self.index]
        requests, found = [], []
        for process, header in enumerate(headers):
            if process == self.index:
                found += parts
            elif to_all or self.first:
                arrays = [(number, np.empty(size, dtype)) for number, size, dtype in header]
                requests += self.begin(receives=[(process, 0, array) for _, array in arrays])
                found += arrays
        for process in others if to_all else [] if self.first else [0]:
            requests += self.begin(sends=[(process, 0, array) for _, array in parts])
        self.finish(requests, self.check)
        return found

    # -- watching --------------------------------------------------------------------------------

    def start_heartbeat(self, seconds: float) -> None:
        """See from now on that all processes answer and go on. seconds: --watchdog; 0: never."""
        if seconds > 0:
            self._heartbeat = Heartbeat(self, seconds)

    def watch(self, pool: RankPool, waits: Callable[[int], bool]) -> None:
        """From now on the ranks of this process are those of the pool. waits: whether a rank waits
        for others."""
        self.check = pool.check
        if self._heartbeat is not None:
            self._heartbeat.watch(pool, waits)

    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()

    def tell(self, to: int, value: Any) -> None:
        """Send something small to a process's `heard`, without waiting for anything."""
        with self._lock:
            self._told = [request for request in self._told if not request.Test()]
            self._told.append(self._data.isend(value, to, WATCH))

    def heard(self) -> list[tuple[int, Any]]:
        """The messages that processes have sent since this was last called."""
        found, status = [], self._mpi.Status()
        with self._lock:
            while self._data.iprobe(self._mpi.ANY_SOURCE, WATCH, status):
                found.append((status.source, self._data.recv(None, status.source, WATCH)))
        return found

    # -- the end ---------------------------------------------------------------------------------

    def abort(self, status: int) -> NoReturn:
        """End all processes, on all machines, with this status."""
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
    """Wait until the other end of a pipe has read all that was written. A launcher drops what a
    process that aborts has in its pipe, which may be the reason."""
    with contextlib.suppress(OSError, ValueError):  # it is no pipe, or has no file
        while any(fcntl.ioctl(stream.fileno(), termios.FIONREAD, b"\0\0\0\0")):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
