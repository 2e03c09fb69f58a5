"""One thread per rank; the first exception stops them all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from llmq.errors import LlmqError


class Stopped(Exception):
    """Raised in a rank's thread because another rank failed. Never the cause of a failure."""


class Workers:
    """What the ranks of one run share: a stop flag and a barrier.

    Anything that makes a rank wait for another must end when `stopped` is set.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.stopped = threading.Event()
        self._barrier = threading.Barrier(world_size)

    def check(self) -> None:
        """Raise Stopped if a rank has failed."""
        if self.stopped.is_set():
            raise Stopped

    def barrier(self) -> None:
        """Wait for all ranks; for set-up and shutdown, not for steady state. May raise Stopped."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Stopped from None

    def stop(self) -> None:
        """Make all ranks stop at their next check or barrier."""
        self.stopped.set()
        self._barrier.abort()


def run_ranks(world_size: int, fn: Callable[[int, Workers], Any]) -> list[Any]:
    """fn(rank, workers) in one thread per rank; the results by rank.

    The first exception stops the others and is raised here; it names the rank, in its message (an
    LlmqError) or in a note. One rank runs in the calling thread. While the ranks run, the calling
    thread only waits: an exception that a signal handler raises in it stops the ranks, too.
    """
    workers = Workers(world_size)
    if world_size == 1:
        return [fn(0, workers)]
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(rank, workers)
        except Stopped:
            workers.stop()
        except BaseException as error:
            failures.append((rank, error))
            workers.stop()

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}")
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            # A signal may be delivered to a rank's thread: look for it now and then.
            while thread.is_alive():
                thread.join(timeout=0.1)
    except BaseException:
        workers.stop()
        for thread in threads:
            thread.join()
        raise
    if failures:
        rank, error = failures[0]
        if isinstance(error, LlmqError):
            raise type(error)(f"rank {rank}: {error}") from error
        error.add_note(f"raised by rank {rank} of {world_size}")
        raise error
    return results
