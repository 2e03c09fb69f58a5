#!/usr/bin/env python3
"""Compare the speed of two checkouts of llmq on one machine, for each row of a `llmq bench` file.

    tools/compare_speed.py OLD NEW benchmarks/h100/h100_recipes.yaml --out speed [--turns 1]
        [--only 0,4]

OLD and NEW are folders that hold the package llmq. A card becomes slower as it gets warm, so each
row runs in both checkouts before the next one begins, and the order changes from row to row. The
table gives both checkouts' tokens per second (medians over turns), the ratio, and seconds to the
first step. The reports of `llmq bench` stay in the folder --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml


def measure(tree: Path, row: Path, out: Path, steps: int, repeats: int) -> dict[str, Any]:
    """Run `llmq bench` of the checkout `tree` on the file `row`, which has a single run; return
    this run's record in the report."""
    command = [sys.executable, "-m", "llmq", "bench", "--config", str(row), "--out", str(out)]
    command += ["--timed-steps", str(steps), "--repeats", str(repeats)]
    paths = [str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    log = out.with_suffix(".log")
    with open(log, "w") as output:
        subprocess.run(command, env=environment, cwd=out.parent, stdout=output, stderr=output)
    report = out.with_name(out.name + ".json")
    if not report.exists():
        sys.exit(f"error: {tree}: no report, see {log}")
    return json.loads(report.read_text())["runs"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", help="rows by number, from 0, with commas")
    parser.add_argument("--timed-steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    shared = yaml.safe_load(args.config.read_text())
    runs = shared.pop("runs")
    chosen = range(len(runs)) if args.only is None else map(int, args.only.split(","))
    trees = {"old": args.old, "new": args.new}
    print(f"{'row':>3} {'old tok/s':>10} {'new tok/s':>10} {'new/old':>8}  first step, s  what")
    for index in chosen:
        row = args.out / f"row{index}.yaml"
        row.write_text(yaml.safe_dump(shared | {"runs": [runs[index]]}))
        speed: dict[str, list[float]] = {name: [] for name in trees}
        first = dict.fromkeys(trees, float("nan"))
        for turn in range(args.turns):
            names = list(trees) if (index + turn) % 2 == 0 else list(trees)[::-1]
            for name in names:
                out = args.out / f"row{index}-{turn}-{name}"
                run = measure(trees[name], row, out, args.timed_steps, args.repeats)
                if run["status"] != "ok":
                    sys.exit(f"error: row {index}, {name}: {run['status']}: {run.get('message')}")
                speed[name].append(run["result"]["tokens_per_second"])
                first[name] = run["result"]["first_step_seconds"]
        old, new = (statistics.median(speed[name]) for name in trees)
        starts = f"{first['old']:5.1f} {first['new']:5.1f}"
        print(
            f"{index:>3} {old:>10,.0f} {new:>10,.0f} {new / old:>8.4f}  {starts:>13}  {runs[index]}"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
