"""The live view, drawn on a terminal that is a string."""

from __future__ import annotations

import io
import math
import os
import re
import sys

import pytest
from rich.console import Console

from llmq.report.live import BARS, WIDTH, LiveView, LossCurve, Panel, Progress, Row, time_left


def curve(values):
    points = LossCurve()
    for value in values:
        points.add(value)
    return points


def test_curve_goes_from_high_to_low():
    assert str(curve([])) == ""
    assert str(curve([5.0])) == BARS[0]
    assert str(curve([8, 7, 6, 5, 4, 3, 2, 1])) == BARS[::-1]
    assert str(curve([1.0, math.nan, math.inf, 2.0])) == BARS[0] + BARS[-1]


@pytest.mark.parametrize("count", [WIDTH, WIDTH + 1, 100, 1000, 12345])
def test_curve_of_a_long_run_stays_short_and_true(count):
    points = curve(float(i) for i in range(count)).points
    assert WIDTH // 2 <= len(points) <= WIDTH
    size = round(points[1] - points[0])
    assert size * len(points) <= count < size * (len(points) + 1)
    assert points == [size * i + (size - 1) / 2 for i in range(len(points))]


def test_time_left():
    assert [time_left(s) for s in (0.9, 61, 3600 * 30 + 59)] == ["0:00:00", "0:01:01", "30:00:59"]


@pytest.fixture
def screen():
    return io.StringIO()


def shown(screen):
    """Everything that was drawn, without the codes that move the cursor and change colours."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "")


def view(screen, first=0, total=10, panel=None):
    console = Console(file=screen, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    return LiveView(console, first, total, panel)


def test_state_is_drawn_below_the_lines(screen):
    live = view(screen, panel=Panel(lambda: [Row(label="0", sample={}, note="GPU is lost")]))
    for step in range(4):
        live.line(f"[T] step {step} [markup] is not read")
        live.progress(step=step + 1, loss=4.0 - step, norm=0.5, lr=1e-3, ms=500.0, tokens=1024)
    live.progress(scores={"eval": 2.71828})
    live.close()
    assert all(f"[T] step {i} [markup] is not read\n" in shown(screen) for i in range(4))
    step, numbers, losses, _, gpu = shown(screen).rstrip("\n").split("\n")[-5:]
    assert re.search(r"step 4/10  [━╸╺ ]{40}  2,048 tok/s   0:00:03 left *$", step)
    assert numbers.split("   ") == ["loss 1", "norm 0.5", "lr 0.001", "eval 2.718"]
    assert losses == BARS[-1] + BARS[5] + BARS[2] + BARS[0]
    assert gpu.split("  ")[-1].strip() == "0 GPU is lost"


@pytest.mark.parametrize("width", [60, 80])
def test_progress_of_a_long_run_takes_three_lines(width):
    progress = Progress(0, 1_000_000)
    numbers = {"loss": 2.5, "norm": 1.23e-5, "lr": 1.23e-5}
    for step in range(50):
        progress.update(step=654_321 + step, ms=12_000.0, tokens=2**22, **numbers)
    console = Console(file=io.StringIO(), width=width)
    console.print(progress.render())
    head, *rest = console.file.getvalue().splitlines()
    assert re.fullmatch(r"step 654370/1000000  ━[━╸ ]+  349,525 tok/s   1152:06:00 left", head)
    assert len(rest) == 2


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (58, ["step 654321/1000000  ━━╸   349,525 tok/s   1152:15:48 left"]),
        (52, ["step 654321/1000000  349,525 tok/s   1152:15:48 left"]),
        (51, ["step 654321/1000000", "349,525 tok/s   1152:15:48 left"]),
        (20, ["step 654321/1000000", "349,525 tok/s", "1152:15:48 left"]),
    ],
)
def test_a_narrow_terminal_gets_lines_that_are_whole(width, lines):
    progress = Progress(654_321, 1_000_000)
    progress.update(ms=12_000.0, tokens=2**22)
    console = Console(file=io.StringIO(), width=width)
    console.print(progress.render())
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == lines


def test_a_line_of_the_log_does_not_cut_the_view_below_it(screen):
    """The line itself is never broken, so that it can be copied."""
    console = Console(file=screen, force_terminal=True, width=20, _environ={"TERM": "xterm"})
    live = LiveView(console, 0, 10)
    live.progress(step=1, loss=4.25, norm=0.5, lr=1e-3)
    live._live.refresh()  # its thread does this
    text = f"[T] step 0 | {40 * 'x'} | tps 99\n"
    live.line(text.rstrip())
    drawn = shown(screen)
    live.close()
    below = drawn[drawn.rindex(text) + len(text) :]
    numbers = ["loss 4.25   norm 0.5", "lr 0.001"]
    assert [line.rstrip() for line in below.split("\n")][1:] == [*numbers, BARS[0]]


def test_a_terminal_without_utf8_gets_a_curve_it_can_show():
    progress = Progress(0, 10)
    for step in range(8):
        progress.update(step=step, loss=8.0 - step)
    file = io.TextIOWrapper(io.BytesIO(), "ascii")
    Console(file=file, width=80).print(progress.render())
    file.seek(0)
    assert file.read().splitlines()[-1].rstrip() == "#*+=-:._"


def test_a_resumed_run_begins_where_it_was(screen):
    live = view(screen, first=6)
    live.close()
    assert shown(screen).rstrip().startswith("step 6/10")


def test_a_terminal_that_is_gone_is_given_up(capsys, monkeypatch):
    with open(os.devnull, "w") as terminal, open("/dev/full", "w") as gone:
        monkeypatch.setattr(sys, "stdout", terminal)
        live = view(None)
        os.dup2(gone.fileno(), terminal.fileno())
        live.line("[T] step")
        live.line("[V] step", bold=True)
        live.progress(step=1)
        live.close()  # and the file, as at exit
    assert capsys.readouterr().err == ""
