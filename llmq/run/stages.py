"""The time from the start of the process to a first token, in parts."""

import time
from collections.abc import Iterator

import psutil

from llmq.base.errors import print_error


class Stages:
    """Parts of a start in their order, each up to its mark; the first one begins with the
    process. printed: whether `first` prints them."""

    def __init__(self, *, printed: bool):
        self.printed, self.seconds = printed, {}
        self._last = time.perf_counter() - (time.time() - psutil.Process().create_time())

    def mark(self, name: str) -> None:
        """End a part."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now

    def first(self, ids: Iterator[int]) -> Iterator[int]:
        """The ids of a text, with a line on standard error when the first one is there."""
        for id_ in ids:
            if self.printed:
                self.mark("first token")
                parts = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items())
                print_error(f"first token after {sum(self.seconds.values()):.2f} s: {parts}")
                self.printed = False
            yield id_
