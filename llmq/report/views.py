"""The places that a run's lines go to: plain output, or the live view of a terminal (live.py)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from llmq.base.console import print_own, printable
from llmq.base.errors import discard, warn

PROGRESS_SECONDS = 3  # between lines about a validation that takes longer


class View(Protocol):
    """A place that lines go to: plain output, or the live view of a terminal.

    shows_sensors: whether it shows GPUs and CPUs all the time.
    """

    shows_sensors: bool

    def line(self, text: str, *, bold: bool = False) -> None:
        """Show one line of the log."""

    def progress(self, **state: Any) -> None:
        """Update what is shown beside the log; keys as in live.LiveView."""

    def close(self) -> None:
        """Stop showing."""


@contextmanager
def optional_console() -> Iterator[None]:
    """Where standard output cannot be written inside the block, training goes on without it.

    The reader has gone (Ctrl-C ends tee, too), the disk under it is full, the terminal was closed.
    """
    try:
        yield
    except OSError as error:
        discard(sys.stdout)
        try:
            warn([f"cannot write standard output ({error.strerror}): training goes on without it"])
        except OSError:  # the same pipe
            discard(sys.stderr)


class PlainView:
    """Lines to standard output, as they come; of a long validation now and then how far it is."""

    shows_sensors = False

    def __init__(self) -> None:
        self._next = 0.0  # time of the next line about a validation

    def line(self, text: str, *, bold: bool = False) -> None:
        with optional_console():
            bold = bold and sys.stdout.isatty()
            text = printable(text)
            print_own(f"\033[1m{text}\033[22m" if bold else text)

    def progress(self, **state: Any) -> None:
        part, now = state.get("validated"), time.monotonic()
        if part == 0.0:
            self._next = now + PROGRESS_SECONDS
        if part is not None and now >= self._next:
            self._next = now + PROGRESS_SECONDS
            self.line(f"  validation: {part:.0%}")

    def close(self) -> None:
        pass


class EvaluationProgress:
    """Shows how far an evaluation is, from the questions whether to stop it."""

    def __init__(self, view: View, batches: int, ranks: int):
        """batches: of each rank."""
        self._view, self._batches, self._ranks, self._asked = view, batches, ranks, 0

    def before_batch(self, stopped: Callable[[], bool]) -> Callable[[], bool]:
        """`stopped`, asked under a lock before each batch of each rank and after its last one."""

        def asked() -> bool:
            self._view.progress(validated=min(self._asked / (self._batches * self._ranks), 1.0))
            self._asked += 1
            return stopped()

        return asked

    @property
    def complete(self) -> bool:
        """Whether every rank has come to the end."""
        return self._asked >= (self._batches + 1) * self._ranks

    def close(self) -> None:
        """The evaluation has ended."""
        self._view.progress(validated=None)
