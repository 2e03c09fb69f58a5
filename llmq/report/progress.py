"""How far a command is that reads or makes tokens, on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any

from llmq.base.console import printable_console

REPORT_SECONDS = 10.0  # between lines where there is no terminal


class Progress:
    """A bar on a terminal, else a line now and then; nothing if it is not enabled.

    Rates are those since the first update, of what was not done before.
    """

    def __init__(self, name: str, total: int, *, enabled: bool = True) -> None:
        """name: the command's. total: of what `update` is told, in any unit."""
        self._name, self._total, self._enabled = name, total, enabled
        self._bar = _bar(name, total) if enabled and sys.stderr.isatty() else None
        self._last = time.monotonic()
        self._first: tuple[int, float] | None = None

    def update(self, done: int, tokens: int | None = None) -> None:
        """done: so far, of the total. tokens: they are; None: the unit is tokens. Both count what
        earlier runs have done."""
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
    from rich import progress  # here: it takes a while to load

    columns = (progress.BarColumn(), progress.TaskProgressColumn())
    bar = progress.Progress(
        *(progress.TextColumn(name), *columns, progress.TextColumn("{task.fields[tokens]}")),
        progress.TimeRemainingColumn(),
        console=printable_console(stderr=True),
    )
    bar.add_task(name, total=total, tokens="")
    return bar
