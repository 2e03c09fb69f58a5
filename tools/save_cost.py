#!/usr/bin/env python3
"""What checkpoints cost a run: without any, between steps, and in the background.

    PYTHONPATH=. tools/save_cost.py --folder /fast/disk [--model Qwen2.5-1.5B] [--interval 20] \
        [-- --batch-size 32 --grad-accumulation 4 ...]

Each way is a run of `llmq train` of its own, over the same random tokens; what follows -- are
further options of all. Time is the log's, between the ends of two steps: from the first interval
on, checkpoints and what waits for them included, without the export.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from llmq.config.presets import preset
from llmq.data.tokens import TokenWriter

TOKENS = 2_000_000  # of the training file, which is read again and again


def seconds_per_step(log: Path, first: int) -> float:
    """From the end of step `first` to that of the last one."""
    steps = [r for r in json.loads(log.read_text()) if r["log"] == "step" and r["step"] >= first]
    ends = [datetime.fromisoformat(step["time"][:26]) for step in (steps[0], steps[-1])]
    return (ends[1] - ends[0]).total_seconds() / (steps[-1]["step"] - steps[0]["step"])


def main(
    extra: Annotated[list[str] | None, typer.Argument(help="options of llmq train")] = None,
    model: Annotated[str, typer.Option(help="preset")] = "Qwen2.5-1.5B",
    interval: Annotated[int, typer.Option(help="steps between checkpoints")] = 20,
    count: Annotated[int, typer.Option(help="checkpoints of a run")] = 4,
    folder: Annotated[Path | None, typer.Option(help="of checkpoints; room for 4")] = None,
) -> None:
    """Measure and print a Markdown table."""
    ways = {
        "no checkpoints": ["--ckpt-interval", "0"],
        "between steps": ["--ckpt-interval", str(interval)],
        "in the background": ["--ckpt-interval", str(interval), "--ckpt-background"],
    }
    found: dict[str, float] = {}
    here = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        tokens, vocab = Path(place) / "train.bin", preset(model).vocab_size
        with TokenWriter(tokens, vocab) as writer:
            writer.write(np.random.default_rng(0).integers(0, vocab, TOKENS, np.int32))
        for name, way in ways.items():
            command = [sys.executable, "-m", "llmq", "train", "--model", model, "--from-scratch"]
            command += ["--train-file", str(tokens), "--eval-file", "none", "--ckpt-keep-n", "1"]
            command += ["--steps", str((count + 1) * interval), "--no-save-training-state"]
            command += [*way, *(extra or [])]
            subprocess.run(command, cwd=place, check=True, env=os.environ | here)
            (log,) = (Path(place) / "logs").iterdir()
            found[name] = seconds_per_step(log, interval - 1)
            for made in ("logs", "ckpt", "output"):
                shutil.rmtree(Path(place) / made, ignore_errors=True)
    plain = found["no checkpoints"]
    print(f"\n{model}, a checkpoint every {interval} steps\n")
    print("| checkpoints | seconds per step | cost |")
    print("| --- | --- | --- |")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.4f} | {seconds / plain - 1:.2%} |")


if __name__ == "__main__":
    typer.run(main)
