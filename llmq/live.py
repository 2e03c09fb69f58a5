"""The live view on a terminal: progress, speed, loss curve and time left under the log lines."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48  # columns of the loss curve


def sparkline(values: list[float], width: int = WIDTH) -> str:
    """One character per bucket of values, the lowest as the lowest bar."""
    if not values:
        return ""
    size = max(-(-len(values) // width), 1)
    buckets = [values[i : i + size] for i in range(0, len(values), size)]
    means = [sum(b) / len(b) for b in buckets]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((m - low) * scale)] for m in means)


def time_left(seconds: float) -> str:
    """Hours, minutes and seconds."""
    seconds = int(seconds)
    return f"{seconds // 3600:d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


class LiveView:
    """A View whose state is drawn below the lines. state: what metrics and monitor report."""

    def __init__(self, console: Console, first_step: int, total_steps: int):
        self._console = console
        self._first, self._total = first_step, total_steps
        self._state: dict[str, Any] = {"step": first_step}
        self._losses: list[float] = []
        self._speeds: deque[float] = deque(maxlen=20)  # ms of the last steps
        self._start = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)
        self._live.start()

    def line(self, text: str, *, bold: bool = False) -> None:
        """Print above the view."""
        style = "bold" if bold else None
        self._console.print(Text(text), style=style, soft_wrap=True)

    def progress(self, **state: Any) -> None:
        """step, loss, norm, lr, ms, tokens after a step; eval_loss; gpu (a line) by the monitor."""
        self._state |= state
        if "loss" in state and state["loss"] == state["loss"]:  # not NaN
            self._losses.append(state["loss"])
        if "ms" in state:
            self._speeds.append(state["ms"])

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.stop()

    def _render(self) -> Group:
        state = self._state
        done, total = state["step"], max(self._total, 1)
        table = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=total, completed=done, width=40)
        left = ""
        if self._speeds:
            per_step = sum(self._speeds) / len(self._speeds) / 1000
            speed = f"{state['tokens'] / per_step:,.0f} tok/s"
            left = f"{speed}   {time_left(per_step * (total - done))} left"
        table.add_row(f"step {done}/{total}", bar, left)
        parts = [f"{key} {state[key]:.4g}" for key in ("loss", "norm", "lr") if key in state]
        if "eval_loss" in state:
            parts.append(f"eval {state['eval_loss']:.4f}")
        rows = [table, Text("   ".join(parts))]
        if self._losses:
            rows.append(Text(f"loss {sparkline(self._losses)}"))
        if "gpu" in state:
            rows.append(Text(state["gpu"]))
        return Group(*rows)
