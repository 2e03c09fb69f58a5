"""Durations of the parts of a command, from the start of the process to a first token."""

import time
from collections.abc import Iterator

import psutil

from llmq.base.errors import print_error


class Stages:
    """Measures the durations of the parts of a program start, in order. A part ends when `mark` is
    called, and the next part begins; the first part begins with the process. printed: True if
    `first` prints the parts."""

    def __init__(self, *, printed: bool):
        self.printed, self.seconds = printed, {}
        self._last = time.perf_counter() - (time.time() - psutil.Process().create_time())

    def mark(self, name: str) -> None:
        """End the present part, and record the part's duration as `name`."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now

    def first(self, ids: Iterator[int]) -> Iterator[int]:
        """Yield the ids of a text; at the first id, print the parts of the start to standard
        error."""
        for id_ in ids:
            if self.printed:
                self.mark("first token")
                parts = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items())
                print_error(f"first token after {sum(self.seconds.values()):.2f} s: {parts}")
                self.printed = False
            yield id_
