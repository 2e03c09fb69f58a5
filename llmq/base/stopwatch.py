"""The stopwatch measures the parts of a run's start in seconds, from the first import to the end of
the first step."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

OTHER = "other"


class Stopwatch:
    """Measures seconds of named parts of the main thread's work. Time within a nested part counts
    for the inner part alone, and time outside of all parts counts for OTHER."""

    def __init__(self) -> None:
        self._open, self._seconds = [OTHER], dict[str, float]()
        self._last = time.perf_counter()
        self.running = True

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the `with` block for the part `name`. The call has no effect in other
        threads or after the last `take`."""
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
        """Return the seconds of each part since the last call, longest first; {} if the stopwatch
        has stopped. last: True to stop the stopwatch."""
        if not self.running:
            return {}
        self._count()
        taken, self._seconds, self.running = self._seconds, {}, not last
        return {name: round(s, 3) for name, s in sorted(taken.items(), key=lambda part: -part[1])}


START = Stopwatch()
"""The stopwatch of this process's start."""
