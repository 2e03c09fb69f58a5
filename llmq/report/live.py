"""The live view of a terminal: progress, speed, loss curve and time left, above a table of GPUs."""

from __future__ import annotations

import io
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llmq.base.console import printable, printable_console
from llmq.base.dtypes import GIB
from llmq.base.errors import LlmqError
from llmq.report.plot import read_log
from llmq.report.views import PlainView, optional_console
from llmq.runtime.nvml import NO_REASON, REASONS, UNSUPPORTED, reason

WIDE = 114  # least columns of a terminal for rows with the card's name, limits and full reasons
STALE = 5.0  # seconds after which a reading counts as old
LATE = 0.01  # least share of a step for which the view names a late rank
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MARKS = {"heat": "bold red", "heat!": "bold red", "power": "yellow", "brake": "bold red"}
_STYLES = {name: _MARKS.get(one.short, "") for one in REASONS for name in (one.text, one.short)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the live view: a GPU, or the CPUs of a machine. label: the rank, or "CPU". sample:
    readings of a `gpu` or `cpu` record. waits: share of a step in which the rank waits for other
    ranks; None if unknown. note: text in place of readings. age: seconds since the readings."""

    label: str
    sample: dict[str, Any]
    name: str = ""
    machine: str = ""
    waits: float | None = None
    note: str = ""
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class Panel:
    """The rows of the live view, drawn anew at each refresh in the terminal's width. rows: the
    function that is called at each refresh."""

    rows: Callable[[], Sequence[Row]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii_only = not (console.encoding or "utf-8").lower().startswith("utf")
        yield from panel_lines(self.rows(), options.max_width, ascii_only=ascii_only)


def _line() -> Text:
    return Text(no_wrap=True, overflow="crop", end="\n")


def _add(line: Text, part: str, width: int, style: str = "", *, left: bool = False) -> None:
    """Append a cell and a blank; a cell that is too wide is cut."""
    part = part if len(part) <= width else part[: width - 1] + "…"
    line.append(part.ljust(width) if left else part.rjust(width), style)
    line.append(" ")


def panel_lines(rows: Sequence[Row], width: int, *, ascii_only: bool = False) -> list[Text]:
    """Return the heading, a line for each GPU, and with several ranks a line about waiting.

    width: columns of the terminal; 80 are enough. ascii_only: True if only ASCII characters can be
    shown.
    """
    gpus = [row for row in rows if row.label != "CPU"]
    lines = [_cpu_line(row, ascii_only) for row in rows if row.label == "CPU"]
    if gpus:
        wide = width >= WIDE
        lines += [_heading(gpus, wide, ascii_only)]
        lines += [_gpu_line(row, wide, ascii_only) for row in gpus]
    waiting = waiting_line(rows)
    if waiting:
        lines.append(Text(waiting, no_wrap=True, overflow="ellipsis"))
    return lines


def bar(part: float, width: int, *, ascii_only: bool = False) -> str:
    """Return a bar of `width` characters, filled to the share `part`, 0 to 1."""
    eighths = round(8 * width * min(max(part, 0.0), 1.0))
    if ascii_only:
        return ("#" * round(eighths / 8)).ljust(width, ".")
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _reading(sample: dict[str, Any], name: str) -> int | None:
    value = sample.get(name, UNSUPPORTED)
    return None if value in (UNSUPPORTED, None) else value


def _number(sample: dict[str, Any], name: str, unit: int = 1, end: str = "") -> str:
    value = _reading(sample, name)
    return "-" if value is None else f"{value / unit:.0f}{end}"


def _pair(sample: dict[str, Any], name: str, limit: str, unit: int = 1) -> str:
    """Return reading and limit, such as 651/700; an unknown limit is left out."""
    most = _number(sample, limit, unit)
    return _number(sample, name, unit) + ("" if most == "-" else f"/{most}")


def _sizes(used: int | None, total: int | None) -> str:
    """Return used and total GiB in at most nine characters; "-" if either size is unknown."""
    if used is None or total is None:
        return "-"
    digits = 1 if total < 100 * GIB else 0
    return f"{used / GIB:.{digits}f}/{total / GIB:.{digits}f}"


def _used_memory(sample: dict[str, Any], free: str = "dram_free") -> int | None:
    free, total = _reading(sample, free), _reading(sample, "dram_total")
    return None if free is None or total is None else total - free


def _rate(sample: dict[str, Any], name: str) -> str:
    """Return bytes per second in at most five characters."""
    value = _reading(sample, name)
    if value is None:
        return "-"
    for unit, letter in ((1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.{1 if value < 99.95 * unit else 0}f}{letter}"
    return f"{value / 1e3:.0f}k"


def _held_by(sample: dict[str, Any], *, wide: bool) -> str:
    """Return why the GPU's clock is held down: "" if it is not, "-" if unknown."""
    reasons = sample.get("reasons", UNSUPPORTED)
    if isinstance(reasons, dict):  # a record's shares begin with the most frequent reason
        found = next((one for one in REASONS if one.text == next(iter(reasons), "")), None)
        supported = sample.get("throttle") != NO_REASON
    else:
        supported = reasons != UNSUPPORTED
        found = reason(reasons) if supported else None
    if found is None:
        return "" if supported else "-"
    return found.text if wide else found.short


def _columns(wide: bool, ascii_only: bool) -> list[tuple[str, int, bool, Callable[[Any], str]]]:
    """Return the columns of readings: heading, width, True if left-aligned, and the function that
    makes a cell."""
    room = 12 if wide else 9

    def use(sample: dict[str, Any]) -> str:
        return bar((_reading(sample, "gpu_util") or 0) / 100, room, ascii_only=ascii_only)

    def memory(sample: dict[str, Any]) -> str:
        return _sizes(_used_memory(sample), _reading(sample, "dram_total"))

    def limited(name: str, limit: str) -> Callable[[dict[str, Any]], str]:
        return lambda sample: _pair(sample, name, limit) if wide else _number(sample, name)

    return [
        ("use", room, True, use),
        ("", 4, False, lambda sample: _number(sample, "gpu_util", end="%")),
        ("mem GiB", 9, False, memory),
        ("W", 9, False, lambda sample: _pair(sample, "power", "power_limit", 1000)),
        (
            "C" if ascii_only else "°C",
            6 if wide else 3,
            False,
            limited("temperature", "temp_slowdown"),
        ),
        ("MHz", 9 if wide else 4, False, limited("clock", "max_clock")),
        ("held by", 13 if wide else 7, True, lambda sample: _held_by(sample, wide=wide)),
        ("PCIin" if ascii_only else "PCI↓", 5, False, lambda sample: _rate(sample, "pcie_rx")),
        ("PCIou" if ascii_only else "PCI↑", 5, False, lambda sample: _rate(sample, "pcie_tx")),
    ]


def _heading(rows: Sequence[Row], wide: bool, ascii_only: bool) -> Text:
    line = _line()
    _add(line, "GPU", 3)
    if wide:
        _add(line, "", 18)
    for heading, width, left, _ in _columns(wide, ascii_only):
        _add(line, heading, width, left=left)
    if any(row.waits is not None for row in rows):
        _add(line, "waits", 6)
    line.stylize("dim")
    return line


def _gpu_line(row: Row, wide: bool, ascii_only: bool) -> Text:
    line = _line()
    _add(line, row.label, 3)
    if wide:
        name = row.name.removeprefix("NVIDIA ").removeprefix("GeForce ")
        _add(line, row.machine or name, 18, left=True)
    late = f"no reading for {row.age:.0f} s" if row.age > STALE else ""
    note = row.note or late or ("" if row.sample else "no readings")
    if note:
        _add(line, note, len(note), "bold red")
        return line
    for _, width, left, cell in _columns(wide, ascii_only):
        text = cell(row.sample)
        _add(line, text, width, _STYLES.get(text, ""), left=left)
    if row.waits is not None:
        _add(line, f"{row.waits:.1%}", 6)
    return line


def _cpu_line(row: Row, ascii_only: bool) -> Text:
    line, sample = _line(), row.sample
    _add(line, "CPU", 3)
    if row.machine:
        _add(line, row.machine, min(len(row.machine), 18))
    _add(line, bar((_reading(sample, "util") or 0) / 100, 9, ascii_only=ascii_only), 9)
    _add(line, _number(sample, "util", end="%"), 4)
    if _reading(sample, "cpus") is not None:
        line.append(f"of {sample['cpus']} cores  ")
    memory = _sizes(_reading(sample, "memory_used"), _reading(sample, "memory_total"))
    line.append(f"memory {memory} GiB")
    return line


def waiting_line(rows: Sequence[Row]) -> str:
    """Return a line about exposed communication and the rank for which other ranks wait; "" if
    unknown. Ranks meet in every exchange, and the last rank to arrive waits least. The difference
    of waiting times is the time that a late rank costs the other ranks."""
    waits = {row.label: row.waits for row in rows if row.waits is not None}
    if len(waits) < 2:
        return ""
    last = min(waits, key=waits.__getitem__)
    others = [share for label, share in waits.items() if label != last]
    later = sum(others) / len(others) - waits[last]
    text = f"exposed communication {sum(waits.values()) / len(waits):.1%} of a step"
    if later < LATE:
        return f"{text}; no GPU keeps the others waiting"
    return f"{text}; the others wait for GPU {last}, {later:.1%} of it"


# ------------------------------------------------------------------------------------------------
# Console lines


def record_line(sample: dict[str, Any]) -> str:
    """Return a sensor record as console text: mean^maximum for most numbers."""
    if "util" in sample:
        used, most = (_reading(sample, name) for name in ("memory_used", "memory_used_max"))
        memory = _reading(sample, "memory_total")
        return f"use {_both(sample, 'util')}% | mem {_sizes_both(used, most, memory)}"
    used, most = (_used_memory(sample, name) for name in ("dram_free", "dram_free_min"))
    held = ", ".join(f"{name} {share}%" for name, share in sample["reasons"].items())
    held = held or ("not told" if sample["throttle"] == NO_REASON else "-")
    pcie = ("pcie_rx", "pcie_tx")
    rates = [f"{_rate(sample, name)}^{_rate(sample, f'{name}_max')}" for name in pcie]
    parts = [
        f"use {_both(sample, 'gpu_util')}%",
        f"mem {_sizes_both(used, most, _reading(sample, 'dram_total'))}",
        f"power {_both(sample, 'power', 1000)}/{_number(sample, 'power_limit', 1000)} W",
        f"temp {_both(sample, 'temperature')}/{_number(sample, 'temp_slowdown')}°C",
        f"clock {_both(sample, 'clock')} MHz",
        f"held by {held}",
        f"PCI↓ {rates[0]} PCI↑ {rates[1]} B/s",
    ]
    if "communication" in sample:
        parts.append(f"waits {sample['communication']:.1f} ms")
    return " | ".join(parts)


def _both(sample: dict[str, Any], name: str, unit: int = 1) -> str:
    return f"{_number(sample, name, unit)}^{_number(sample, f'{name}_max', unit)}"


def _sizes_both(used: int | None, most: int | None, total: int | None) -> str:
    if used is None or most is None or total is None:
        return "-"
    return f"{used / GIB:.1f}^{most / GIB:.1f}/{total / GIB:.1f} GiB"


BARS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(BARS, "_.:-=+*#")  # characters for a terminal without UTF-8
LEAST_BAR = 4  # least columns of the bar of steps
DRAWS = 2  # refreshes per second; few enough for a slow connection
WIDTH = 48  # most columns of the loss curve
LAST_LINES = 12  # log lines in a notebook


class LossCurve:
    """A loss curve of at most WIDTH points; each point is the mean of equally many values. When all
    points are filled, neighbours are joined, so that adding a value stays cheap in a long run."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._size = 1  # values in each point
        self._sum = 0.0  # sum of the values that do not fill a point yet
        self._count = 0

    def add(self, value: float) -> None:
        """Add the next value; a value that is not finite is left out."""
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
        """Return a character for each point; the lowest value is the lowest bar."""
        if not self.points:
            return ""
        low, high = min(self.points), max(self.points)
        scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
        return "".join(BARS[round((point - low) * scale)] for point in self.points)


def time_left(seconds: float) -> str:
    """Return seconds as H:MM:SS."""
    whole = int(seconds)
    return f"{whole // 3600:d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@dataclass(frozen=True, slots=True)
class _Shown:
    """The lines of `Progress.render`. In a narrow terminal the bar of steps becomes shorter or
    disappears; a still longer line becomes two lines."""

    step: int
    total: int
    speed: str
    lines: list[Text]
    curve: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._head(options.max_width)
        yield from self.lines
        if self.curve:
            yield Text(self.curve.translate(_ASCII) if options.ascii_only else self.curve)

    def _head(self, width: int) -> Text | Table:
        steps = f"step {self.step}/{self.total}"
        if len(steps) + LEAST_BAR + len(self.speed) + 4 > width:
            fit = len(steps) + len(self.speed) + 2 <= width
            return Text(("  " if fit else "\n").join(filter(None, (steps, self.speed))))
        grid = Table.grid(padding=(0, 2))
        for no_wrap in (True, False, True):
            grid.add_column(no_wrap=no_wrap)
        bar = ProgressBar(total=self.total, completed=self.step, width=40)
        grid.add_row(steps, bar, self.speed)
        return grid


class Progress:
    """The progress of a run, drawn as lines above the GPUs of the live view. total: steps of the
    run."""

    def __init__(self, first_step: int, total_steps: int):
        """first_step: number of steps already done, of total_steps."""
        self.total = max(total_steps, 1)
        self._state: dict[str, Any] = {"step": first_step}
        self.curve = LossCurve()
        self._times: deque[float] = deque(maxlen=20)  # ms of recent steps

    def update(self, **state: Any) -> None:
        """Update the state with the keywords of LiveView.progress."""
        self._state |= state
        if "loss" in state:
            self.curve.add(state["loss"])
        if "ms" in state:
            self._times.append(state["ms"])

    def render(self, *, goes_on: bool = True) -> _Shown:
        """Return the lines: three lines, or more with many scores. goes_on: False leaves out the
        time left."""
        state = self._state
        numbers = [f"{name} {state[name]:.4g}" for name in ("loss", "norm", "lr") if name in state]
        more = state.get("numbers", {}) | state.get("scores", {})
        numbers += [f"{name} {value:.4g}" for name, value in more.items()]
        if state.get("validated") is not None:
            numbers.append(f"validation {state['validated']:.0%}")
        lines = [Text("   ".join(numbers))] if numbers else []
        for name, text in state.get("texts", {}).items():
            lines.append(Text(f"{name}: {printable(text)}", no_wrap=True, overflow="ellipsis"))
        if state.get("alarm") is not None:
            lines.append(Text(f"ALARM: {state['alarm']}", "bold red"))
        speed = self._speed(goes_on)
        return _Shown(state["step"], self.total, speed, lines, str(self.curve))

    @property
    def ms(self) -> float:
        """Return the mean time of recent steps in ms; 0 before the first step."""
        return sum(self._times) / len(self._times) if self._times else 0.0

    def _speed(self, goes_on: bool) -> str:
        """Return tokens per second and the time left, from recent steps; "" before the first
        step."""
        if not self._times:
            return ""
        seconds = self.ms / 1000
        speed = f"{self._state['tokens'] / max(seconds, 1e-9):,.0f} tok/s"
        left = time_left(seconds * (self.total - self._state["step"]))
        return f"{speed}   {left} left" if goes_on else speed


class LiveView(PlainView):
    """Prints log lines, with the run's state drawn below the lines."""

    def __init__(
        self,
        console: Console,
        first_step: int,
        total_steps: int,
        panel: Panel | None = None,
        losses: Iterable[float] = (),
        brief: bool = True,
    ):
        """first_step: number of done steps, of total_steps. panel: table of GPUs. losses: losses of
        the done steps, with which the curve begins. brief: see PlainView."""
        self._console, self._panel = console, panel
        self.shows_sensors, self.brief = panel is not None, brief
        self._progress = Progress(first_step, total_steps)
        for loss in losses:
            self._progress.curve.add(loss)
        self._live = Live(self._render(), console=console, refresh_per_second=DRAWS)
        self._live.start()

    def line(self, text: str, *, bold: bool = False) -> None:
        """Print a line above the view."""
        with optional_console():
            # Print the line in full, because only the view below is cut to the terminal's width.
            line = Text(text, "bold" if bold else "", no_wrap=True, overflow="ignore")
            self._console.print(Group(line), crop=False)  # rich would copy a bare Text

    def progress(self, **state: Any) -> None:
        """Update the numbers of the view. After a step, the keywords are step (number of done
        steps), loss, norm, lr, ms, tokens, and numbers (parts of the loss, by name). After an
        evaluation, the keyword is scores, by name. After samples, the keyword is texts, by name,
        shown as a line each. validated: done fraction of a validation, None when no validation
        runs. alarm: text of an alarm, or None."""
        self._progress.update(**state)
        self._live.update(self._render())  # rich's own thread draws the view

    def close(self) -> None:
        with optional_console():
            self._live.stop()

    def _render(self) -> Group:
        return Group(self._progress.render(), *([] if self._panel is None else [self._panel]))


class NotebookView(PlainView):
    """Shows the state of a run above its last log lines, in a single output of a notebook cell."""

    brief = True

    def __init__(self, first_step: int, total_steps: int, losses: Iterable[float] = ()):
        """The arguments are those of LiveView."""
        super().__init__()
        from IPython.display import display  # installed in every notebook

        self._progress, self._lines = Progress(first_step, total_steps), deque(maxlen=LAST_LINES)
        for loss in losses:
            self._progress.curve.add(loss)
        self._drawn = time.monotonic()
        self._output = display(self._render(), raw=True, display_id=True)

    def line(self, text: str, *, bold: bool = False) -> None:
        """Show a line below the state, in place of the oldest line."""
        self._lines.append(Text(printable(text), "bold" if bold else ""))
        self._draw()

    def progress(self, **state: Any) -> None:
        """Update the view with the keywords of LiveView.progress."""
        self._progress.update(**state)
        self._draw()

    def close(self) -> None:
        self._output.update(self._render(), raw=True)

    def _draw(self) -> None:
        if time.monotonic() - self._drawn >= 1 / DRAWS:
            self._output.update(self._render(), raw=True)
            self._drawn = time.monotonic()

    def _render(self) -> dict[str, str]:
        """Return the cell's output, by MIME type."""
        console = Console(
            file=io.StringIO(), record=True, force_jupyter=False, force_terminal=False, width=WIDE
        )
        console.print(Group(self._progress.render(), *self._lines))
        text = console.export_text(clear=False)
        page = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        return {"text/plain": text, "text/html": page}


def _losses(log: Path, steps_done: int) -> list[float]:
    """Return losses of the done steps from the log of a resumed run; [] if the log has no losses or
    cannot be read."""
    if steps_done == 0:
        return []
    with suppress(LlmqError):
        steps = (r for r in read_log(log) if r["log"] == "step" and r["step"] < steps_done)
        return [math.nan if r["loss"] is None else r["loss"] for r in steps]
    return []


def view_of_run(
    steps_done: int, total_steps: int, panel: Panel | None, log: Path, brief: bool
) -> PlainView:
    """Return a live view for a terminal or notebook; any other output, and a run without remaining
    steps, gets a PlainView. panel: table of GPUs. log: the run's log, with its done steps. brief:
    see PlainView."""
    console = printable_console()
    if steps_done >= total_steps:
        return PlainView()
    if console.is_jupyter:
        return NotebookView(steps_done, total_steps, _losses(log, steps_done))
    if console.is_terminal and not console.is_dumb_terminal:
        losses = _losses(log, steps_done)
        return LiveView(console, steps_done, total_steps, panel, losses, brief)
    return PlainView()
