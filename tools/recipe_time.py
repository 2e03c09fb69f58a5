"""Show how far recipes end from the time that they promise.

    python tools/recipe_time.py --data DIR --out OUT --hours 0.0125 [--hours 0.05 ...]
    [options of `llmq recipe`]

Each recipe is made and trained, one after the other. OUT.md is the table, OUT.json its numbers,
both written after each; what OUT.json has is not made again, and --join OUT1.json,OUT2.json takes
what other GPUs made. The time is that of `llmq train` from its start to its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.files import read_json, write_file

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def trained(hours: float, data: Path, options: list[str]) -> dict[str, Any]:
    """The recipe's record with `took`, the seconds of its run, and the loss that it ended with."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        command = [sys.executable, "-m", "llmq"]
        own = ["--hours", str(hours), "--data", str(data), "--out", str(place / "r.yaml")]
        made = subprocess.run(
            [*command, "recipe", *own, *options, "--json"], check=True, stdout=subprocess.PIPE
        )
        places = [f"--out-dir={place / 'm'}", f"--checkpoint-dir={place / 'c'}"]
        places += [f"--log-file={place / 'log.json'}", "--max-hours=0"]
        start = time.monotonic()
        subprocess.run(
            [*command, "train", "--config", str(place / "r.yaml"), *places],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        took = time.monotonic() - start
        records = json.loads((place / "log.json").read_text())
    losses = [record["loss"] for record in records if record["log"] == "eval"]
    return json.loads(made.stdout) | {"hours": hours, "took": took, "found": losses[-1]}


def table(runs: list[dict[str, Any]]) -> list[str]:
    """A row for each recipe."""
    names = "hours | parameters | tokens | tried | promised, s | took, s | off | loss | found"
    lines = [f"| {names} |", f"|{' --- |' * 9}"]
    for run in runs:
        promised = f"{run['seconds']:.1f} ± {100 * run['seconds_error']:.1f} %"
        off = f"{100 * (run['took'] / run['seconds'] - 1):+.1f} %"
        loss = "none" if run["loss"] is None else f"{run['loss']:.3f}"
        sizes = f"{run['parameters'] / 1e6:.1f}M | {run['tokens'] / 1e6:.0f}M"
        tried = "yes" if run["timed"] else "no"
        times = f"{promised} | {run['took']:.1f} | {off}"
        lines.append(
            f"| {run['hours']:g} | {sizes} | {tried} | {times} | {loss} | {run['found']:.3f} |"
        )
    return lines


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def main(
    context: typer.Context,
    hours: Annotated[list[float], typer.Option(help="Of a recipe; as often as there are.")],
    data: Annotated[Path, typer.Option(help="Folder with train*.bin and eval*.bin.")],
    out: Annotated[Path, typer.Option(help="Results, without an ending.")],
    join: Annotated[str, typer.Option(help="Results of the same options, by other calls.")] = "",
) -> None:
    """Make and train a recipe for each number of hours."""
    files = [Path(file) for file in [*filter(None, join.split(",")), out.with_suffix(".json")]]
    made = [run for file in files if file.exists() for run in read_json(file)["runs"]]
    runs: list[dict[str, Any]] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for each in hours:
        known = [run for run in made if run["hours"] == each]
        runs.append(known[0] if known else trained(each, data, context.args))
        command = f"`{' '.join(['tools/recipe_time.py', *sys.argv[1:]])}`"
        head = [f"# Promised and taken times of recipes: {runs[0]['card']}", "", command, ""]
        write_file(out.with_suffix(".json"), json.dumps({"runs": runs}, indent=1) + "\n")
        write_file(out.with_suffix(".md"), "\n".join([*head, *table(runs)]) + "\n")
        print(table(runs)[-1], flush=True)


if __name__ == "__main__":
    app()
