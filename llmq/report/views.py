"""Output of a run's lines, plain or through a live view (live.py); and progress of commands that
read or write tokens."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmq.base.console import print_own, printable, printable_console
from llmq.base.errors import discard, warn

PROGRESS_SECONDS = 3  # seconds between lines about a long validation


@contextmanager
def optional_console() -> Iterator[None]:
    """Let training continue without standard output if code within the context cannot write it.
    Possible causes: the reading process has ended (Ctrl-C ends tee, too), the disk is full, or the
    terminal was closed."""
    try:
        yield
    except OSError as error:
        discard(sys.stdout)
        warn(f"cannot write standard output ({error.strerror}): training goes on without it")


class PlainView:
    """Prints lines on standard output, and every few seconds the progress of a long validation.

    shows_sensors: True if GPUs and CPUs are always shown. brief: True if lines of steps and
    validations are short, because the view shows further numbers.
    """

    shows_sensors = False
    brief = False

    def __init__(self) -> None:
        self._next = 0.0  # time of the next line about a validation

    def line(self, text: str, *, bold: bool = False) -> None:
        """Show a line of the log."""
        with optional_console():
            bold = bold and sys.stdout.isatty()
            text = printable(text)
            print_own(f"\033[1m{text}\033[22m" if bold else text)

    def progress(self, **state: Any) -> None:
        """Show the progress of a run beside the log. The keywords are those of
        live.LiveView.progress."""
        part, now = state.get("validated"), time.monotonic()
        if part == 0.0:
            self._next = now + PROGRESS_SECONDS
        if part is not None and now >= self._next:
            self._next = now + PROGRESS_SECONDS
            self.line(f"  validation: {part:.0%}")

    def close(self) -> None:
        """Stop showing the run."""


REPORT_SECONDS = 10.0  # seconds between lines about progress without a terminal


class Progress:
    """Shows progress as a bar on a terminal, and as a line every REPORT_SECONDS elsewhere. With
    enabled=False nothing is shown. Rates exclude work done before the first update."""

    def __init__(self, name: str, total: int, *, enabled: bool = True) -> None:
        """name: name of the command. total: the whole work in the unit of `update`."""
        self._name, self._total, self._enabled = name, total, enabled
        self._bar = _bar(name, total) if enabled and sys.stderr.isatty() else None
        self._last = time.monotonic()
        self._first: tuple[int, float] | None = None

    def update(self, done: int, tokens: int | None = None) -> None:
        """done: work done so far, including earlier runs. tokens: tokens of this work; None: the
        unit of work is tokens."""
        now, tokens = time.monotonic(), done if tokens is None else tokens
        self._first = self._first or (tokens, now)
        first, start = self._first
        rate = (tokens - first) / max(now - start, 1e-9)
        speed = f"{rate / 1e6:.2f}M/s" if rate >= 1e5 else f"{rate:.0f}/s"
        text = f"{tokens / 1e6:.1f}M tokens, {speed}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, tokens=text)
        elif self._enabled and now - self._last >= REPORT_SECONDS:
            self._last = now
            percent = 100 * done / max(self._total, 1)
            print(f"{self._name} {percent:5.1f}% | {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(name: str, total: int) -> Any:
    from rich import progress  # imported here, being slow

    columns = (progress.BarColumn(), progress.TaskProgressColumn())
    bar = progress.Progress(
        *(progress.TextColumn(name), *columns, progress.TextColumn("{task.fields[tokens]}")),
        progress.TimeRemainingColumn(),
        console=printable_console(stderr=True),
    )
    bar.add_task(name, total=total, tokens="")
    return bar
