#!/usr/bin/env python3
"""Measure what a checkpoint every so many steps costs a run, in turns within one run.

    PYTHONPATH=. tools/save_cost.py [--model Qwen2.5-1.5B] [--interval 20] [--checkpoints 2] \
        [--folder /dev/shm] [--between-steps] [--out saves.txt] \
        [-- --batch-size 16 --grad-accumulation 2 ...]

A run of `llmq train --ckpt-background` on random tokens writes a checkpoint every 2 x interval
steps. So windows of `interval` steps follow each other, without a checkpoint and with one, written,
read back and the one before deleted; the first one warms up. The cost is that of each window with a
checkpoint over the mean of the two beside it: a clock that falls as the GPU warms up is in both. A
window lasts from the log's record of the step before it to that of its last step, so that whatever
stands between two steps counts. It begins a step before its checkpoint: a run writes the record of
a step when it has enqueued the next one, but at once where a checkpoint follows. A window from
there would be too long by the difference, and the one before it too short. A write that does not
end within its window is an error, because at this interval a run would wait for it, and the next
window would not be free of it.

The cost leaves this out: a run that ends while a checkpoint is being written waits for it, once;
how long one takes is printed. The run is stopped after the last window, without an export.
--between-steps: the same again without --ckpt-background. Options behind -- are those of the run.
--out gets what is printed, line by line, so that it has all that was found if this is cut off.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llmq.base.dtypes import GIB
from llmq.base.errors import DataError
from llmq.data.tokens import TokenWriter
from llmq.options.presets import preset
from llmq.report.json_log import LogReader

ROOT = Path(__file__).resolve().parents[1]
POLL = 0.5  # seconds between two looks at the log
LEAD = 1  # steps of a window in front of its checkpoint
LINES = 20  # of what a run has said that are shown if it fails
WRITTEN = re.compile(r"The checkpoint of step (\d+) was written in ([\d.]+) s")
SAVED = "saving checkpoint to "

Records = list[dict[str, Any]]


class Window(NamedTuple):
    """Steps first to last, both included. saved: step of the checkpoint that is written in it, or
    None. seconds: from the record of the step before to that of the last one. median: milliseconds
    of a step, without what comes between steps. between: seconds that no step took."""

    first: int
    last: int
    saved: int | None
    seconds: float
    median: float
    between: float

    def __str__(self) -> str:
        what = "none" if self.saved is None else "one"
        times = f"{self.seconds:.3f} | {self.between:.3f} | {self.median:.1f}"
        return f"| {self.first} to {self.last} | {what} | {times} |"


def windows_of(records: Records, interval: int) -> Iterator[Window]:
    """Those that are complete in a log, without the first one. ValueError where the checkpoint of
    one is not."""
    steps = [record for record in records if record["log"] == "step"]
    for first in range(interval - LEAD, len(steps) - interval + 1, interval):
        step, inside = first + LEAD, steps[first : first + interval]
        saved = step if step % (2 * interval) == 0 else None
        if saved and seconds_of_write(records, saved, inside[-1]["time"]) is None:
            raise ValueError(
                f"the checkpoint of step {saved} was not complete at the end of its window, step "
                f"{inside[-1]['step']}: choose a longer --interval or a faster --folder"
            )
        seconds = inside[-1]["time"] - steps[first - 1]["time"]
        times = [step["duration_ms"] for step in inside]
        median, between = statistics.median(times), max(seconds - sum(times) / 1e3, 0.0)
        yield Window(first, inside[-1]["step"], saved, seconds, median, between)


def seconds_of_write(records: Records, step: int, end: float) -> float | None:
    """In which the checkpoint of this step was written; None if it was not, up to this time."""
    for record in records:
        text = record.get("message", "")
        if record["time"] > end or not text:
            continue
        if (found := WRITTEN.match(text)) is not None and int(found[1]) == step:
            return float(found[2])
        if text.startswith(SAVED) and record["step"] == step and "duration_ms" in record:
            return record["duration_ms"] / 1e3
    return None


def costs(windows: list[Window]) -> list[float]:
    """The cost of each window with a checkpoint, beside its neighbours without."""
    beside = zip(windows[::2], windows[1::2], windows[2::2], strict=False)
    return [2 * one.seconds / (before.seconds + after.seconds) - 1 for before, one, after in beside]


class Report:
    """Lines that are printed, and written to a file as far as they are known."""

    def __init__(self, path: Path | None):
        self._path = path
        self.lines: list[str] = []

    def say(self, line: str = "") -> None:
        """Add a line."""
        self.lines.append(line)
        print(line, flush=True)
        if self._path is not None:
            self._path.write_text("\n".join(self.lines) + "\n")


def summary(windows: list[Window], writes: list[float], interval: int) -> list[str]:
    """The lines that follow from all windows. writes: seconds of each checkpoint."""
    lines = ["", "| checkpoints | steps | seconds | seconds per step | median step, ms |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, saves in (("none", False), (f"every {interval} steps", True)):
        own = [window for window in windows if (window.saved is not None) == saves]
        steps, seconds = interval * len(own), sum(window.seconds for window in own)
        median = statistics.median(window.median for window in own)
        lines.append(f"| {name} | {steps} | {seconds:.3f} | {seconds / steps:.5f} | {median:.1f} |")
    each = costs(windows)
    spelled = ", ".join(f"{100 * cost:.2f} %" for cost in each)
    taken = ", ".join(f"{seconds:.1f} s" for seconds in writes)
    lines += ["", f"Cost: {100 * statistics.mean(each):.2f} % of the time ({spelled})."]
    lines.append(f"A checkpoint was written in {taken}.")
    return lines


def planned(command: list[str]) -> dict[str, Any]:
    """The run's plan by `llmq plan`."""
    plan = [*command[:3], "plan", *command[4:], "--json"]
    done = subprocess.run(plan, stdout=subprocess.PIPE, env=environment(), check=False)
    if done.returncode:
        raise SystemExit(f"llmq plan has failed: {' '.join(plan)}")
    return json.loads(done.stdout)


def environment() -> dict[str, str]:
    """The environment of a run: this tree's program."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


def place_for(folder: Path | None, needed: int, report: Report) -> Path:
    """A folder with room for that many bytes: this one, else that of temporary files."""
    places = [Path(tempfile.gettempdir())]
    if folder is not None:
        places.insert(0, folder)
    for place in places:
        free = shutil.disk_usage(place).free if place.is_dir() else 0
        report.say(f"{place}: {free / GIB:.2f} GiB are free, {needed / GIB:.2f} are needed")
        if free >= needed:
            return place
    raise SystemExit("there is no room for the checkpoints: choose another --folder")


def heading(records: Records, way: str) -> list[str]:
    """The heading of the table of windows."""
    gpus = [record["name"] for record in records if record["log"] == "gpu-model"]
    title = f"{gpus[0] if gpus else 'CPU'}, checkpoints {way}"
    names = "| steps | checkpoints | seconds | between steps | median step, ms |"
    return ["", title, "", names, "| --- | --- | --- | --- | --- |"]


def measure(
    command: list[str], log: Path, way: str, interval: int, count: int, report: Report
) -> Records:
    """Run until the log has so many windows, telling of each; its records."""
    said, records, told = log.with_name("said.txt"), [], 0
    reader = LogReader(log)
    with open(said, "wb") as output:
        process = subprocess.Popen(
            command, cwd=log.parent, stdout=output, stderr=subprocess.STDOUT, env=environment()
        )
    try:
        while told < count:
            ended = process.poll() is not None
            with suppress(DataError):  # there is no log yet
                records += reader.new_records()
            for window in list(windows_of(records, interval))[told:]:
                if not told:
                    for line in heading(records, way):
                        report.say(line)
                report.say(str(window))
                told += 1
            if ended and told < count:
                last = said.read_text(errors="replace").splitlines()[-LINES:]
                raise SystemExit("\n".join([*last, f"the run has ended after {told} windows"]))
            time.sleep(POLL)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        process.kill()
        process.wait()
    return records


def main(
    extra: Annotated[list[str] | None, typer.Argument(help="options of llmq train")] = None,
    model: Annotated[str, typer.Option(help="preset")] = "Qwen2.5-1.5B",
    interval: Annotated[int, typer.Option(min=LEAD + 1, help="steps between checkpoints")] = 20,
    checkpoints: Annotated[int, typer.Option(min=1, help="that are measured")] = 2,
    folder: Annotated[Path | None, typer.Option(help="of checkpoints")] = None,
    between_steps: Annotated[bool, typer.Option(help="also without --ckpt-background")] = False,
    out: Annotated[Path | None, typer.Option(help="file for what is printed")] = None,
) -> None:
    """Measure and print Markdown tables."""
    report, count = Report(out), 2 * checkpoints + 1
    steps = (count + 1) * interval
    command = [sys.executable, "-m", "llmq", "train", "--model", model, "--from-scratch"]
    command += ["--steps", str(steps), "--ckpt-interval", str(2 * interval), "--ckpt-keep-n", "1"]
    command += ["--no-save-training-state", "--eval-file", "none", "--ckpt-background"]
    command += extra or []
    plan = planned([*command, "--train-file", "train.bin"])
    report.say(" ".join(["llmq", *command[3:]]))
    tokens = plan["tokens_per_step"] * (steps + 1) + 1
    needed = (plan["checkpoints_kept"] + 1) * plan["checkpoint_bytes"] + 4 * tokens
    where = place_for(folder, needed, report)
    for way in ["in the background", "between steps"][: 1 + between_steps]:
        with tempfile.TemporaryDirectory(dir=where) as place:
            data, log = Path(place) / "train.bin", Path(place) / "log.json"
            vocab = preset(model).vocab_size
            with TokenWriter(data, vocab) as writer:
                writer.write(np.random.default_rng(0).integers(0, vocab, tokens, np.int32))
            run = [*command, "--train-file", str(data), "--log-file", str(log)]
            if way == "between steps":
                run.remove("--ckpt-background")
            records = measure(run, log, way, interval, count, report)
        windows = list(windows_of(records, interval))[:count]
        writes = [
            seconds_of_write(records, window.saved, float("inf"))
            for window in windows
            if window.saved is not None
        ]
        for line in summary(windows, writes, interval):
            report.say(line)
        if way == "in the background":
            report.say("A run that ends meanwhile waits for the rest of that, once: not counted.")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    typer.run(main)
