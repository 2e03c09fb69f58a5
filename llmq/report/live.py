"""The live view on a terminal: progress, speed, loss curve and time left under the log lines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llmq.base.console import printable_console
from llmq.base.errors import DataError
from llmq.report.curves import read_log
from llmq.report.gauges import Panel
from llmq.report.views import PlainView, View, optional_console
from llmq.runtime.processes import processes

BARS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(BARS, "_.:-=+*#")  # of a terminal without UTF-8
LEAST_BAR = 4  # columns of the bar of steps
DRAWS = 2  # of the view in a second, which is also fit for a slow line
WIDTH = 48  # columns of the loss curve, at most


class LossCurve:
    """The course of a loss in at most WIDTH points; each is the mean of equally many values.

    When the points run out, neighbours are joined, so that adding a value to a long run costs no
    more than to a short one.
    """

    def __init__(self) -> None:
        self.points: list[float] = []
        self._size = 1  # values in each point
        self._sum = 0.0  # of the values that do not make a point yet
        self._count = 0

    def add(self, value: float) -> None:
        """The next value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._sum += value
        self._count += 1
        if self._count < self._size:
            return
        if len(self.points) == WIDTH:
            halves = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(a + b) / 2 for a, b in halves]
            self._size *= 2
            return
        self.points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0

    def __str__(self) -> str:
        """One character per point, the lowest value as the lowest bar."""
        if not self.points:
            return ""
        low, high = min(self.points), max(self.points)
        scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
        return "".join(BARS[round((point - low) * scale)] for point in self.points)


def time_left(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = int(seconds)
    return f"{whole // 3600:d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@dataclass(frozen=True, slots=True)
class _Head:
    """The line of steps and speed. Where there is too little room its bar is shorter, and where
    there is none, it has no bar or is two lines."""

    step: int
    total: int
    speed: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        steps = f"step {self.step}/{self.total}"
        if len(steps) + LEAST_BAR + len(self.speed) + 4 > options.max_width:
            fit = len(steps) + len(self.speed) + 2 <= options.max_width
            yield Text(("  " if fit else "\n").join(filter(None, (steps, self.speed))))
            return
        grid = Table.grid(padding=(0, 2))
        for no_wrap in (True, False, True):
            grid.add_column(no_wrap=no_wrap)
        bar = ProgressBar(total=self.total, completed=self.step, width=40)
        grid.add_row(steps, bar, self.speed)
        yield grid


@dataclass(frozen=True, slots=True)
class _Curve:
    """A loss curve as the terminal can show it; nothing where it is empty."""

    bars: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.bars:
            yield Text(self.bars.translate(_ASCII) if options.ascii_only else self.bars)


class Progress:
    """How far a run is: the lines of the live view that are not about GPUs.

    total: steps of the run.
    """

    def __init__(self, first_step: int, total_steps: int):
        """first_step: steps that are done already, of total_steps."""
        self.total = max(total_steps, 1)
        self._state: dict[str, Any] = {"step": first_step}
        self._curve = LossCurve()
        self._times: deque[float] = deque(maxlen=20)  # ms of the last steps

    def add(self, loss: float) -> None:
        """One more point of the curve."""
        self._curve.add(loss)

    def update(self, **state: Any) -> None:
        """Do as LiveView.progress."""
        self._state |= state
        if "loss" in state:
            self.add(state["loss"])
        if "ms" in state:
            self._times.append(state["ms"])

    def render(self, *, goes_on: bool = True) -> Group:
        """Its lines: three, or more where scores have many names. A run that does not go on has no
        time left."""
        state = self._state
        head = _Head(state["step"], self.total, self._speed(goes_on))
        numbers = [f"{name} {state[name]:.4g}" for name in ("loss", "norm", "lr") if name in state]
        more = state.get("numbers", {}) | state.get("scores", {})
        numbers += [f"{name} {value:.4g}" for name, value in more.items()]
        if state.get("validated") is not None:
            numbers.append(f"validation {state['validated']:.0%}")
        lines = [Text("   ".join(numbers))] if numbers else []
        if state.get("alarm") is not None:
            lines.append(Text(f"ALARM: {state['alarm']}", "bold red"))
        return Group(head, *lines, _Curve(str(self._curve)))

    @property
    def ms(self) -> float:
        """The mean time of the last steps; 0 as long as there is none."""
        return sum(self._times) / len(self._times) if self._times else 0.0

    def _speed(self, goes_on: bool) -> str:
        """Tokens per second and the time left, from the last steps."""
        if not self._times:
            return ""
        seconds = self.ms / 1000
        speed = f"{self._state['tokens'] / max(seconds, 1e-9):,.0f} tok/s"
        left = time_left(seconds * (self.total - self._state["step"]))
        return f"{speed}   {left} left" if goes_on else speed


class LiveView:
    """A views.View whose state is drawn below the lines."""

    def __init__(
        self,
        console: Console,
        first_step: int,
        total_steps: int,
        panel: Panel | None = None,
        losses: Iterable[float] = (),
    ):
        """first_step: steps that are done already, of total_steps. panel: of GPUs. losses: of the
        steps that are done, with which the curve begins."""
        self._console, self._panel = console, panel
        self.shows_sensors = panel is not None
        self._progress = Progress(first_step, total_steps)
        for loss in losses:
            self._progress.add(loss)
        self._live = Live(self._render(), console=console, refresh_per_second=DRAWS)
        self._live.start()

    def line(self, text: str, *, bold: bool = False) -> None:
        """Print above the view."""
        with optional_console():
            # All of it, and cut nowhere, which is not meant for the view that is drawn behind it.
            line = Text(text, "bold" if bold else "", no_wrap=True, overflow="ignore")
            self._console.print(Group(line), crop=False)  # a Text alone is made anew

    def progress(self, **state: Any) -> None:
        """step (done so far), loss, norm, lr, ms, tokens, and numbers of the loss by name after a
        step; scores, by name, after an evaluation; validated, the part of a validation that is
        done, None if there is none; alarm, what must not be overlooked, None if there is nothing.
        """
        self._progress.update(**state)
        self._live.update(self._render())  # drawn by a thread of its own, which sees only this

    def close(self) -> None:
        with optional_console():
            self._live.stop()

    def _render(self) -> Group:
        return Group(self._progress.render(), *([] if self._panel is None else [self._panel]))


def _losses(log: Path, steps_done: int) -> list[float]:
    """Those of a log that a run goes on with; none where there are none, or it is of others."""
    if steps_done == 0:
        return []
    with suppress(DataError):
        steps = (r for r in read_log(log) if r["log"] == "step" and r["step"] < steps_done)
        return [math.nan if r["loss"] is None else r["loss"] for r in steps]
    return []


def view_of_run(steps_done: int, total_steps: int, panel: Panel | None, log: Path) -> View:
    """A live view on a terminal, if there is anything to see; else lines. panel: of GPUs. log: of
    the run, which has the steps that are done."""
    console = printable_console()
    if processes().count > 1:  # a launcher lets the first one see a terminal where there is none
        return PlainView()
    if steps_done < total_steps and console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, steps_done, total_steps, panel, _losses(log, steps_done))
    return PlainView()
