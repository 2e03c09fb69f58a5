"""Measure what `llmq train --tensorboard` costs a run on the CPU: each step, and beside the run.

    python tools/watch_cost.py [--steps 300] [-- --batch-size 1 ...]

A run of the smallest model on random tokens sends its log while it goes on. Printed are the median
time of a step; the median, the mean and the largest time that the run's thread spends on the
process that sends, after each step (its start is none of them); and the processor's time of that
process, which goes on beside the run and mostly imports a library. Options behind -- are those of
`llmq train`.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
from llmq.commands.cli import train_main
from llmq.data.tokens import TokenWriter
from llmq.options.presets import preset
from llmq.report.json_log import LogReader
from llmq.run.watcher import Watcher

MODEL = "tiny"
TOKENS = 100_000


def run(folder: Path, options: list[str]) -> int:
    """Train in this folder; the exit status."""
    with TokenWriter(folder / "train.bin", preset(MODEL).vocab_size) as writer:
        writer.write(np.random.default_rng(0).integers(0, preset(MODEL).vocab_size, TOKENS))
    command = ["--model", MODEL, "--from-scratch", "--device", "cpu", "--gpus", "1"]
    command += ["--train-file", str(folder / "train.bin"), "--eval-file", "none"]
    command += ["--log-file", str(folder / "log.json"), "--checkpoint-dir", str(folder / "ckpt")]
    command += ["--out-dir", str(folder / "out"), "--tensorboard", str(folder / "runs"), *options]
    arguments, sys.argv[1:] = sys.argv[1:], command
    try:
        train_main()
    except SystemExit as end:
        return end.code
    finally:
        sys.argv[1:] = arguments


def main(
    extra: Annotated[list[str] | None, typer.Argument(help="options of llmq train")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 300,
) -> None:
    """Measure and print."""
    times: list[float] = []
    after_step = Watcher.after_step

    def timed(self: Watcher, *args: Any) -> None:
        start = time.perf_counter()
        after_step(self, *args)
        times.append(time.perf_counter() - start)

    Watcher.after_step = timed
    try:
        with tempfile.TemporaryDirectory() as place:
            status = run(Path(place), ["--steps", str(steps), *(extra or [])])
            if status:
                raise SystemExit(status)
            records = list(LogReader(Path(place) / "log.json").new_records())
    finally:
        Watcher.after_step = after_step
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    step = statistics.median(r["duration_ms"] for r in records if r["log"] == "step")
    cost = [1e6 * f(times) for f in (statistics.median, statistics.mean, max)]
    print(f"a step: {step:.1f} ms; {len(times)} steps, {os.cpu_count()} cores")
    print(
        f"after each, in the run's thread: median {cost[0]:.1f} us ({cost[0] / step / 10:.3f} %), "
        f"mean {cost[1]:.1f} us, largest {cost[2]:.1f} us"
    )
    print(f"the process beside it: {usage.ru_utime + usage.ru_stime:.2f} s of a processor")


if __name__ == "__main__":
    typer.run(main)
