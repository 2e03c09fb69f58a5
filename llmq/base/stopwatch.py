"""Seconds of the parts of a run's start, from the first module to the end of the first step."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

OTHER = "other"


class Stopwatch:
    """Seconds of named parts of the main thread's work. Time within a part inside another part
    counts for the inner part alone, time outside of parts for OTHER."""

    def __init__(self) -> None:
        self._open, self._seconds = [OTHER], dict[str, float]()
        self._last = time.perf_counter()
        self.running = True

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the `with` block as a part of the work. No effect in other threads, or after the
        last `take`."""
        if not self.running or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        now, name = time.perf_counter(), self._open[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def take(self, *, last: bool = False) -> dict[str, float]:
        """Return the seconds by name since the last call, the most first; {} once it has stopped.
        last: stop."""
        if not self.running:
            return {}
        self._count()
        taken, self._seconds, self.running = self._seconds, {}, not last
        return {name: round(s, 3) for name, s in sorted(taken.items(), key=lambda part: -part[1])}


START = Stopwatch()
"""The start of this process."""
